"""Run folders and a board that serves them, for tests of the dashboard."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from board_examples import LION, TOKEN
from report_folders import write_run_folder

from thrifty.dashboard.board_server import BoardServer
from thrifty.dashboard.board_site import BoardSite


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def site(runs: Path, tmp_path: Path) -> BoardSite:
    return BoardSite(runs, [tmp_path / "results"], lambda: [LION])


Serve = Callable[..., BoardServer]


@pytest.fixture
def serve(site: BoardSite) -> Iterator[Serve]:
    """Return a function that starts a board for the site, by default on any free port. All boards end with the test."""
    with ExitStack() as stack:

        def start(port: int = 0, token: str = TOKEN) -> BoardServer:
            server = stack.enter_context(BoardServer(site, token, port))
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            return server

        yield start


@pytest.fixture
def run_folder(runs: Path) -> Callable[..., Path]:
    return lambda name="kjv", steps=120, **replaced: write_run_folder(runs / name, steps, **replaced)
