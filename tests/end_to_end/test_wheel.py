"""An installed wheel in an empty folder shows the same evidence as the clone."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 3 << 20
"""Maximum number of bytes of the wheel."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    words = ["pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *words], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_is_small_and_has_the_evidence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    results = {path.relative_to(ROOT / "results") for path in (ROOT / "results").rglob("*.json")}
    assert {f"thrifty/results/{path.as_posix()}" for path in results} <= set(names)
    assert wheel.stat().st_size < LARGEST


@pytest.mark.slow
def test_an_installed_wheel_shows_the_evidence_of_the_clone(wheel: Path, tmp_path: Path) -> None:
    fresh, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    venv.create(fresh, with_pip=False)
    (site,) = fresh.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)],
        check=True,
    )
    libraries = sysconfig.get_paths()["purelib"]  # torch and others; this folder comes after the installed wheel
    (site / "shared.pth").write_text(f"{libraries}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def printed(python: Path | str, technique: str, **more: str) -> str:
        words = [str(python), "-m", "thrifty", "show", technique]
        run = subprocess.run(words, cwd=work, env=environment | more, capture_output=True, text=True, check=True)
        return run.stdout

    for technique in ("initializations.fixup", "optimizers.lion", "adapters.lora", "memory.recompute"):
        installed = printed(fresh / "bin" / "python", technique)
        cloned = printed(sys.executable, technique, PYTHONPATH=str(ROOT / "src"))
        assert str(site / "thrifty" / "results") in installed and "not measured yet" not in installed
        assert installed.replace(str(site / "thrifty"), "") == cloned.replace(str(ROOT), "")
