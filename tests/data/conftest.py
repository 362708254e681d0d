"""Fixtures: each test of data has its own cache folder, and no network."""

from pathlib import Path

import pytest

SENTENCES = (
    "The whale swam past the harbour at dawn. ",
    "Nobody on the quay had seen it, or would say so. ",
    "It turned twice, blew once, and was gone before noon. ",
    "Of the boats that followed, three came home empty. ",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("THRIFTY_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return folder


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A folder of 60 different small text files."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for number in range(60):
        text = "".join(SENTENCES[(number * step) % 4] for step in range(1, 12 + number % 7))
        (folder / f"{number:02}.txt").write_text(f"Story {number}. {text}")
    return folder
