"""State of the disk after a power cut: flushed data is complete. Other data may be complete, missing, or zeros."""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkpoint_worlds import FailingDisk, assert_same, state_of

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import IntegrityError
from thrifty.training.checkpoint import load, save
from thrifty.training.checkpoint_index import checkpoints, remove_leftovers
from thrifty.training.checkpoint_manifest import verify


@dataclass
class Node:
    """File (`content`) or folder (`entries`), at present and at the last flush."""

    content: bytes | None = None
    entries: dict[str, int] = field(default_factory=dict)
    flushed_content: bytes = b""
    flushed_entries: dict[str, int] = field(default_factory=dict)


class MemoryOfDisk(AtomicFiles):
    """Real disk with a model of its flushed data. It stops the save after `last` changes."""

    def __init__(self, root: Path):
        self.root, self.nodes, self.changes = root, {os.stat(root).st_ino: Node()}, 0
        self.last: int | None = None

    def _changed(self) -> None:
        self.changes += 1
        if self.last is not None and self.changes >= self.last:
            raise PowerCut

    def _folder(self, path: Path) -> Node:
        return self.nodes[os.stat(path.parent).st_ino]

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        number = os.stat(path).st_ino
        self.nodes[number] = Node()
        self._folder(path).entries[path.name] = number
        self._changed()

    def create_file(self, path: Path) -> int:
        descriptor = super().create_file(path)
        number = os.fstat(descriptor).st_ino
        self.nodes[number] = Node(b"")
        self._folder(path).entries[path.name] = number
        self._changed()
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        length = super().write(descriptor, data)
        node = self.nodes[os.fstat(descriptor).st_ino]
        node.content = (node.content or b"") + bytes(data[:length])
        self._changed()
        return length

    def sync(self, descriptor: int) -> None:
        node = self.nodes[os.fstat(descriptor).st_ino]
        node.flushed_content, node.flushed_entries = node.content or b"", dict(node.entries)
        self._changed()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._folder(target).entries[target.name] = self._folder(source).entries.pop(source.name)
        self._changed()

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        del self._folder(path).entries[path.name]
        self._changed()

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        del self._folder(path).entries[path.name]
        self._changed()

    def after_power_cut(self, target: Path, chance: random.Random) -> None:
        """Write a possible content of the disk after the power cut."""
        shutil.rmtree(target, ignore_errors=True)
        self._restore(self.nodes[os.stat(self.root).st_ino], target, chance)

    def _restore(self, node: Node, path: Path, chance: random.Random) -> None:
        if node.content is None:
            path.mkdir()
            for name, number in chance.choice([node.entries, node.flushed_entries]).items():
                self._restore(self.nodes[number], path / name, chance)
        else:
            zeros = node.flushed_content + bytes(len(node.content) - len(node.flushed_content))
            path.write_bytes(chance.choice([node.content, node.flushed_content, zeros]))


class PowerCut(BaseException):
    """Power failure: no more code runs."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("steps", "step"), [([], 1), ([1], 2), ([1, 2, 3], 4), ([1, 2], 2)])
def test_power_cut_at_any_change_leaves_old_or_new_state(steps: list[int], step: int, tmp_path: Path) -> None:
    chance, cut, changes, finished = random.Random(3), tmp_path / "found", 1, False
    while not finished:
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        disk = MemoryOfDisk(root)
        for earlier in steps:
            save(root / "checkpoints", earlier, *state_of(earlier), files=disk, best=earlier == 1)
        disk.last = disk.changes + changes
        try:
            save(root / "checkpoints", step, *state_of(99), files=disk, best=True)
            finished = True
        except PowerCut:
            changes += 1
        for _ in range(8):
            disk.after_power_cut(cut, chance)
            try:
                loaded = load(cut / "checkpoints")
            except IntegrityError as error:
                assert not steps and not finished and "there is no checkpoint" in error.what
                continue
            assert loaded.notices == []
            assert all(verify(path) for path in checkpoints(cut / "checkpoints"))
            seed = loaded.scalars["seed"]
            assert seed == 99 or (not finished and seed == steps[-1])
            assert_same(loaded.tensors, state_of(seed)[0])
    assert changes > 20


def test_failed_swap_leaves_old_or_new_text(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    AtomicFiles().swap_text(file, "old")
    complete = FailingDisk()
    complete.swap_text(file, "old")
    seen = set()
    for at in range(len(complete.done)):
        with pytest.raises(OSError, match="Input/output"):
            FailingDisk(at, "broken").swap_text(file, "new")
        seen.add(file.read_text())
        AtomicFiles().swap_text(file, "old")
    assert seen == {"old", "new"}


def test_removing_a_folder_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "old" / "deep" / "file").write_text("x")
    (tmp_path / "old" / "link").symlink_to(tmp_path / "precious")
    AtomicFiles().remove_tree(tmp_path / "old")
    assert not (tmp_path / "old").exists()
    assert (tmp_path / "precious" / "file").read_text() == "keep"


def test_write_file_returns_length_and_hash(tmp_path: Path) -> None:
    written = AtomicFiles().write_file(tmp_path / "file", [b"a" * 40_000_000, b"", memoryview(b"b")])
    assert written.bytes == (tmp_path / "file").stat().st_size == 40_000_001
    assert written.sha256 == "59b04e220564f8499ff37e1fbcd5806baf81605777f4d7a27883924e29ebd63c"


def test_swap_uses_an_unpredictable_temporary_name(tmp_path: Path) -> None:
    """A swap does not write through a link or hard link at its temporary name."""
    precious, names = tmp_path / "precious", []
    precious.write_text("precious")

    class Watched(AtomicFiles):
        def create_file(self, path: Path) -> int:
            names.append(path.name)
            return super().create_file(path)

    for kind in (os.symlink, os.link):
        for name in (".page.html.partial", f".page.html.{os.getpid()}", "page.html"):
            (tmp_path / name).unlink(missing_ok=True)
            kind(precious, tmp_path / name)
        Watched().swap_text(tmp_path / "page.html", "mine")
        assert (precious.read_text(), (tmp_path / "page.html").read_text()) == ("precious", "mine")
        with pytest.raises(FileExistsError):
            AtomicFiles().create_file(tmp_path / ".page.html.partial")
    assert len(set(names)) == 2


def test_removing_a_linked_folder_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("precious")
    (tmp_path / "step-00000001.removed-0f").symlink_to(tmp_path / "theirs")
    remove_leftovers(tmp_path, AtomicFiles())
    assert not (tmp_path / "step-00000001.removed-0f").is_symlink() and (tmp_path / "theirs" / "file").exists()
