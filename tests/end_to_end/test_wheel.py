"""Wheel and source distribution: complete, licensed, typed; an installed wheel shows the evidence of the clone."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import thrifty

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


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built by the backend that pyproject.toml names, and unpacked."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from hatchling.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
def test_a_wheel_is_small_and_has_the_evidence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    results = {path.relative_to(ROOT / "results") for path in (ROOT / "results").rglob("*.json")}
    assert {f"thrifty/results/{path.as_posix()}" for path in results} <= set(names)
    assert wheel.stat().st_size < LARGEST


@pytest.mark.slow
def test_the_wheel_has_licence_types_and_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = message_from_bytes(packed.read(metadata))
    assert {"thrifty/py.typed", "thrifty/__init__.pyi"} <= set(names)
    assert metadata.replace("METADATA", "licenses/LICENSE") in names
    assert described["Version"] == thrifty.__version__ and described["License-Expression"] == "Apache-2.0"
    assert described["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in described.get_all("Classifier", [])
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    words = ["pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *words, str(unpacked)], check=True)
    (again,) = tmp_path.glob("*.whl")
    contents = [{info.filename: info.CRC for info in zipfile.ZipFile(each).infolist()} for each in (wheel, again)]
    assert contents[0] == contents[1]
    assert {"LICENSE", "CITATION.cff", "CHANGELOG.md", "Makefile", "docs", "tests"} <= set(os.listdir(unpacked))


def test_version_and_licence_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = dict(
        line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines() if ": " in line
    )
    assert project["dynamic"] == ["version"] and citation["version"] == thrifty.__version__
    assert citation["license"] == project["license"]
    assert f"## {thrifty.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


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
        assert "results/" in installed and "not measured yet" not in installed
        assert installed == cloned
