"""Disk and memory are compared with what a run requires before its first step."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_recipes
from PIL import Image

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import InfeasibleError
from thrifty.core.out_of_memory import OutOfMemory
from thrifty.core.recipe import CheckpointSettings, DataSettings, ModelSettings, ObjectiveSettings
from thrifty.training import required_room
from thrifty.training.data_opening import open_examples
from thrifty.training.run_folder import RunFolder
from thrifty.training.trainer import resume, train


def free(monkeypatch: pytest.MonkeyPatch, disk: float | None = None, memory: float | None = None) -> None:
    if disk is not None:
        monkeypatch.setattr(AtomicFiles, "free_bytes", lambda self, folder: disk)
    if memory is not None:
        monkeypatch.setattr(required_room, "free_memory", lambda device: memory)


def test_little_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(tiny_recipes.text(tmp_path), checkpoints=CheckpointSettings(every=1, keep=3))
    with monkeypatch.context() as small:
        free(small, disk=1e5)
        with pytest.raises(InfeasibleError, match=r"writes checkpoints of [\d.]+ MB to .*where 0 MB are free") as error:
            train(recipe, tmp_path, quiet=True)
    assert 'settings={"checkpoints.keep": 1} keeps fewer' in error.value.fix
    assert not list((tmp_path / "text").glob("re*"))
    assert train(recipe, tmp_path, quiet=True)["status"] == "finished"  # its name is free


def test_a_resume_counts_the_checkpoints_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(tiny_recipes.text(tmp_path), checkpoints=CheckpointSettings(every=1, keep=1))
    train(recipe, tmp_path, quiet=True, observers=[lambda record: record.step < 2])
    each = max(sum(file.stat().st_size for file in one.iterdir()) for one in (tmp_path / "text").glob("checkpoints/s*"))
    with monkeypatch.context() as small:
        free(small, disk=0.5 * each)
        with pytest.raises(InfeasibleError, match="writes checkpoints") as error:
            resume(tmp_path / "text", recipe, quiet=True)
        assert f"thrifty resume {tmp_path / 'text'}" in error.value.fix
        free(small, disk=2.5 * each)
        assert resume(tmp_path / "text", recipe, quiet=True)["status"] == "finished"


def test_little_disk_is_refused_before_data_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    recipe = tiny_recipes.text(tmp_path)
    for side in range(2):
        (tmp_path / "photos" / str(side)).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / str(side) / "a.png")
    with monkeypatch.context() as small:
        free(small, disk=1000)
        for data, what in ((recipe.data, "the tokens of"), (DataSettings(str(tmp_path / "photos"), size=32), "images")):
            of_images = {"model": ModelSettings("vit-nano"), "objective": ObjectiveSettings("classification")}
            chosen = replace(recipe, data=data, **(of_images if data.size else {}))
            with pytest.raises(InfeasibleError, match=rf"preparing .*{what} .*0 MB are free\n.*THRIFTY_CACHE") as error:
                open_examples(chosen, lambda text: None)
            assert error.value.exit_code == 3
    assert not list((tmp_path / "cache" / "prepared").glob("[!.]*"))


def test_little_memory_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipes.text(tmp_path)
    with monkeypatch.context() as small:
        free(small, memory=1e5)
        with pytest.raises(OutOfMemory, match=r"the run needs \d+ MB of memory, and 0 MB are free") as error:
            train(recipe, tmp_path, quiet=True)
    assert error.value.exit_code == 3 and "--with " in error.value.fix
    assert RunFolder(tmp_path / "text").read_json("summary")["status"] == "stopped"
    assert resume(tmp_path / "text", recipe, quiet=True)["status"] == "finished"
