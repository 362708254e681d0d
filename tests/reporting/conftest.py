"""Run folders with the values of a small language model on a laptop, for the tests of reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_folders import write_run_folder

from thrifty.reporting.run_page import write_report

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return a function that writes a run folder. `replaced` sets the content of files; None omits a file."""

    def write(name: str = "kjv", steps: int = 600, **replaced: Any) -> Path:
        return write_run_folder(tmp_path / "runs" / name, steps, **replaced)

    return write


@pytest.fixture(scope="session")
def standard_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of an ordinary finished run; read-only."""
    return write_report(write_run_folder(tmp_path_factory.mktemp("standard") / "runs" / "kjv"))
