"""`thrifty board` on the command line: its output, and access to its address file."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from click.testing import CliRunner

from thrifty.cli.board import command
from thrifty.core.errors import UsageError
from thrifty.dashboard.board_server import BoardServer


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def started(cache, tmp_path, monkeypatch):
    """Return a function that starts a board, which ends at once. The function returns the board's address and the pages
    opened in the browser."""
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(BoardServer, "serve_forever", lambda self: None)

    def start(*words):
        opened = []

        def show(address):
            page = Path(unquote(urlparse(address).path))
            opened.append((address, page.read_text(), page.stat().st_mode & 0o777))

        monkeypatch.setattr("webbrowser.open", show)
        shown = CliRunner().invoke(command, ["--runs", str(tmp_path / "runs"), "--port", "0", *words])
        return shown.stdout.splitlines()[0], opened

    return start


def test_each_start_has_a_new_address_and_no_open_opens_nothing(started):
    (first, opened), (second, _) = started("--no-open"), started("--no-open")
    tokens = [urlparse(address).path.strip("/") for address in (first, second)]
    assert first.startswith("http://127.0.0.1:") and not opened
    assert tokens[0] != tokens[1] and min(map(len, tokens)) >= 32


def test_the_browser_opens_a_private_file_with_the_address(started, cache):
    address, [(opened, page, mode)] = started()
    token = urlparse(address).path.strip("/")
    assert opened.startswith("file://") and token not in opened
    assert f"url={address}" in page and mode == 0o600
    assert not [*cache.glob("board-*")]  # removed with the board


def test_a_missing_folder_is_a_usage_error(cache, tmp_path):
    result = CliRunner().invoke(command, ["--runs", str(tmp_path / "nothing"), "--no-open"])
    assert isinstance(result.exception, UsageError) and "--runs" in result.exception.fix


def test_the_board_starts_without_torch():
    code = "import sys, thrifty.cli.board, thrifty.dashboard.board_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
