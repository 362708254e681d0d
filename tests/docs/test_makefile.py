"""The Makefile installs what is asked for, once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_other_extras_are_installed_on_request(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(REPOSITORY / name, tmp_path / name)
    bin_folder, log = tmp_path / ".venv" / "bin", tmp_path / "log"
    bin_folder.mkdir(parents=True)
    for name in ("pip", "ruff", "pyrefly", "lint-imports"):
        (bin_folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{log}"\n')
        (bin_folder / name).chmod(0o755)
    # what the make that runs the tests was told is not for this one
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "EXTRAS")
    }
    for extras in ([], [], ["EXTRAS=test,triton"], ["EXTRAS=test,triton"], []):
        subprocess.run(["make", "lint", *extras], cwd=tmp_path, env=own, check=True, capture_output=True)
    installed = [line.rpartition(".[")[2] for line in log.read_text().splitlines() if line.startswith("pip ")]
    assert installed == ["test]", "test,triton]"]
