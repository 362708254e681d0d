"""Damage of any bytes of a checkpoint is detected, and the previous checkpoint is used."""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_worlds import Crash, FailingDisk, assert_same, names, state_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from table_samples import whole_tables

from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.training.checkpoint import load, save
from thrifty.training.checkpoint_index import best, checkpoints

Damage = Callable[[Path, random.Random], None]


def any_file(checkpoint: Path, chance: random.Random) -> Path:
    return checkpoint / chance.choice(names(checkpoint))


def flip_a_bit(checkpoint: Path, chance: random.Random) -> None:
    file = any_file(checkpoint, chance)
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def cut_short(checkpoint: Path, chance: random.Random) -> None:
    file = any_file(checkpoint, chance)
    content = file.read_bytes()
    file.write_bytes(content[: chance.choice([0, 1, len(content) // 2, len(content) - 1])])


def fill_with_zeros(checkpoint: Path, chance: random.Random) -> None:
    file = any_file(checkpoint, chance)
    file.write_bytes(bytes(file.stat().st_size))


def zero_a_range(checkpoint: Path, chance: random.Random) -> None:
    file = any_file(checkpoint, chance)
    content = bytearray(file.read_bytes())
    start = chance.randrange(len(content) - 1)
    while not any(content[start : start + 64]):
        start = chance.randrange(len(content) - 1)
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    file.write_bytes(content)


def append_a_byte(checkpoint: Path, chance: random.Random) -> None:
    with any_file(checkpoint, chance).open("ab") as file:
        file.write(b"\n")


def remove_a_file(checkpoint: Path, chance: random.Random) -> None:
    any_file(checkpoint, chance).unlink()


def add_a_file(checkpoint: Path, chance: random.Random) -> None:
    (checkpoint / chance.choice(["tensors-00001-of-00002.safetensors", "extra.pt", ".hidden"])).write_bytes(b"")


def add_a_folder(checkpoint: Path, chance: random.Random) -> None:
    (checkpoint / "more").mkdir()


def swap_two_files(checkpoint: Path, chance: random.Random) -> None:
    one, other = chance.sample(names(checkpoint), 2)
    (checkpoint / one).rename(checkpoint / "aside")
    (checkpoint / other).rename(checkpoint / one)
    (checkpoint / "aside").rename(checkpoint / other)


def take_a_file_of_another_checkpoint(checkpoint: Path, chance: random.Random) -> None:
    file = any_file(checkpoint, chance)
    shutil.copy(checkpoint.with_name("step-00000001") / file.name, file)


def put_another_checkpoint_in_its_place(checkpoint: Path, chance: random.Random) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-00000001"), checkpoint)


def edit_a_number(checkpoint: Path, chance: random.Random) -> None:
    file = checkpoint / chance.choice(["state.json", "manifest.json"])
    text = file.read_text()
    place = chance.choice([place for place, letter in enumerate(text) if letter.isdigit()])
    file.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])


def reformat_json(checkpoint: Path, chance: random.Random) -> None:
    file = checkpoint / chance.choice(["state.json", "manifest.json"])
    file.write_text(file.read_text().replace("\n", "\n "))


def link_a_file(checkpoint: Path, chance: random.Random) -> None:
    file = any_file(checkpoint, chance)
    target = file.rename(checkpoint.parent / f"elsewhere {file.name}")
    file.symlink_to(target)


DAMAGES: list[Damage] = [
    flip_a_bit, cut_short, fill_with_zeros, zero_a_range, append_a_byte, remove_a_file, add_a_file, add_a_folder,
    swap_two_files, take_a_file_of_another_checkpoint, put_another_checkpoint_in_its_place, edit_a_number,
    reformat_json, link_a_file,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_quarantined_and_skipped(damage: Damage, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "sound", step, *state_of(step))
    chance = random.Random(damage.__name__)
    for _ in range((100 if damage is flip_a_bit else 25) if whole_tables() else 10):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "sound", folder)
        damage(folder / "step-00000002", chance)
        loaded = load(folder, files=FailingDisk())
        assert (loaded.step, loaded.scalars) == (1, state_of(1)[1])
        assert_same(loaded.tensors, state_of(1)[0])
        assert len(loaded.notices) == 1
        assert "checkpoint step-00000002 is damaged: " in loaded.notices[0]
        assert "moved to quarantine/step-00000002" in loaded.notices[0]
        assert names(folder / "quarantine") == ["step-00000002"]
        assert load(folder).notices == []
        shutil.rmtree(folder)


class Shelf(RuleBasedStateMachine):
    """State machine: save, crash, fill, damage and load in any order, compared with a model of the expected content."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "checkpoints"
        self.step = 1
        self.seed = 0
        self.sound: dict[str, int] = {}
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder.parent)

    def standing(self) -> list[str]:
        return [path.name for path in checkpoints(self.folder)]

    def save(self, disk: FailingDisk, is_best: bool, keep: int) -> bool:
        self.seed += 1
        before = set(self.standing())
        try:
            saved = save(self.folder, self.step, *state_of(self.seed), files=disk, best=is_best, keep=keep)
        except (Crash, ThriftyError):
            saved = None
        for name in set(self.standing()) - before:
            self.sound[name] = self.seed
        if saved is not None:
            assert self.sound[saved.path.name] == self.seed
        return saved is not None

    @rule(is_best=st.booleans(), keep=st.integers(1, 3), forward=st.integers(0, 2))
    def saves(self, is_best: bool, keep: int, forward: int) -> None:
        self.step += forward
        expected = [name for name in self.standing() if name in self.sound]
        best_before = best(self.folder) if self.folder.exists() else None
        assert self.save(FailingDisk(), is_best, keep)
        left = set(self.standing())
        assert set(expected[len(expected) - (keep - 1) :]) <= left, "the last sound ones stay"
        if best_before is not None and not is_best:
            assert best_before.name in left or best_before.name in self.damaged
        self.forget_the_removed()

    @rule(at=st.integers(0, 30), how=st.sampled_from(["crash", "full", "broken"]), forward=st.integers(0, 2))
    def tries_to_save(self, at: int, how: str, forward: int) -> None:
        self.step += forward
        newest = [name for name in self.standing() if name in self.sound][-1:]
        self.save(FailingDisk(at, how), False, 2)
        assert set(newest) <= set(self.standing())
        self.forget_the_removed()

    @precondition(lambda self: self.sound)
    @rule(data=st.data())
    def decays(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sound)))
        flip_a_bit(self.folder / name, random.Random(data.draw(st.integers(0, 99))))
        del self.sound[name]
        self.damaged.add(name)

    @rule()
    def loads(self) -> None:
        standing = self.standing()
        sound = [name for name in standing if name in self.sound]
        if not sound:
            with pytest.raises(IntegrityError):
                load(self.folder)
            assert self.standing() == standing
            return
        loaded = load(self.folder, files=FailingDisk())
        assert loaded.path.name == sound[-1]
        assert_same(loaded.tensors, state_of(self.sound[sound[-1]])[0])
        newer = standing[standing.index(sound[-1]) + 1 :]
        assert sorted(notice.split()[1] for notice in loaded.notices) == sorted(newer)
        self.forget_the_removed()

    @invariant()
    def hints_never_matter(self) -> None:
        if self.folder.exists() and self.seed % 3 == 0:
            (self.folder / "LATEST").write_text("step-99999999")

    def forget_the_removed(self) -> None:
        standing = set(self.standing())
        self.sound = {name: seed for name, seed in self.sound.items() if name in standing}
        self.damaged &= standing


TestShelf = Shelf.TestCase
TestShelf.settings = settings(max_examples=40, stateful_step_count=20, suppress_health_check=list(HealthCheck))
