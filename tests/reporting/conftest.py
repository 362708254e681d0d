"""Run folders with the numbers of a small language model on a laptop, for the tests of the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_folders import write_run_folder

from thrifty.reporting.run_page import write_report

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run folder; `replaced` files hold other values, or are left out when given as None."""

    def write(name: str = "kjv", steps: int = 600, **replaced: Any) -> Path:
        return write_run_folder(tmp_path / "runs" / name, steps, **replaced)

    return write


@pytest.fixture(scope="session")
def standard_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an ordinary finished run; only to be looked at."""
    return write_report(write_run_folder(tmp_path_factory.mktemp("standard") / "runs" / "kjv"))
