"""A crash or a full disk at any moment of a save loses no earlier checkpoint."""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_worlds import Crash, FailingDisk, assert_same, names, save_without_end, state_of
from rank_processes import PROCESSES

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.training.checkpoint import LoadedCheckpoint, load, save
from thrifty.training.checkpoint_index import BEST, LATEST, checkpoints, step_of
from thrifty.training.checkpoint_manifest import verify

HISTORIES = {
    "the first save": ([], 1, 2),
    "the second save": ([1], 2, 2),
    "a save that removes an old one": ([1, 2], 3, 2),
    "a save that keeps the best": ([1, 2, 3], 4, 2),
    "a save that keeps only itself": ([2], 3, 1),
    "the same step again": ([1, 2], 2, 2),
}
"""Steps saved before, the step to save, and the number of checkpoints to keep."""

History = tuple[Path, list[int], int, int]


@pytest.fixture(params=HISTORIES)
def history(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    steps, step, keep = HISTORIES[request.param]
    before = tmp_path / "before"
    for earlier in steps:
        save(before, earlier, *state_of(earlier), best=earlier == 1)
    return before, steps, step, keep


def attempt(before: Path, step: int, keep: int, disk: FailingDisk) -> tuple[Path, BaseException | None]:
    """Save new content once on a copy of the history."""
    folder = before.with_name("now")
    shutil.rmtree(folder, ignore_errors=True)
    if before.exists():
        shutil.copytree(before, folder)
    try:
        save(folder, step, *state_of(100 + step), files=disk, best=True, keep=keep)
    except (Crash, ThriftyError) as error:
        return folder, error
    return folder, None


def assert_old_or_new(folder: Path, steps: list[int], step: int) -> LoadedCheckpoint | None:
    try:
        loaded = load(folder)
    except IntegrityError as error:
        assert not steps and "there is no checkpoint" in error.what
        return None
    assert not loaded.notices
    standing = checkpoints(folder)
    assert [verify(path) for path in standing] == [step_of(path) for path in standing]
    for hint in (LATEST, BEST):
        assert not (folder / hint).exists() or (folder / (folder / hint).read_text().strip()) in standing
    new = loaded.scalars["seed"] == 100 + step
    expected, scalars = state_of(100 + step if new else steps[-1])
    assert loaded.step == (step if new else steps[-1])
    assert loaded.scalars == scalars
    assert_same(loaded.tensors, expected)
    return loaded


def assert_goes_on(folder: Path, step: int) -> None:
    saved = save(folder, step + 1, *state_of(200), files=FailingDisk())
    assert not saved.notices
    assert_same(load(folder).tensors, state_of(200)[0])
    assert not [name for name in names(folder) if "partial" in name or "removed" in name]


@pytest.mark.sampled(3)
def test_a_crash_leaves_the_old_or_the_new_state(history: History) -> None:
    before, steps, step, keep = history
    complete = FailingDisk()
    attempt(before, step, keep, complete)
    outcomes = []
    for at in range(len(complete.done)):
        folder, error = attempt(before, step, keep, FailingDisk(at))
        assert isinstance(error, Crash)
        loaded = assert_old_or_new(folder, steps, step)
        outcomes.append(loaded is not None and loaded.scalars["seed"] == 100 + step)
        assert_goes_on(folder, step)
    assert outcomes == sorted(outcomes), "once the new state is there it stays"
    assert len(outcomes) >= 20
    assert True in outcomes
    assert False in outcomes


@pytest.mark.sampled(3)
def test_a_full_disk_leaves_the_old_state_and_names_the_need(history: History) -> None:
    before, steps, step, keep = history
    complete = FailingDisk()
    attempt(before, step, keep, complete)
    for at in range(len(complete.done)):
        folder, error = attempt(before, step, keep, FailingDisk(at, "full"))
        if error is None:
            assert not {"write", "create file", "make folder"} & set(complete.done[at:])
        else:
            assert "the disk is full" in str(error)
            assert "bytes missing" in str(error)
            assert "free at least" in str(error)
        if folder.exists():
            assert not [name for name in names(folder) if "partial" in name]
            assert_old_or_new(folder, steps, step)
        assert_goes_on(folder, step)


@pytest.mark.sampled(3)
def test_a_failing_disk_keeps_earlier_checkpoints(history: History) -> None:
    before, steps, step, keep = history
    complete = FailingDisk()
    attempt(before, step, keep, complete)
    for at in range(len(complete.done)):
        folder, error = attempt(before, step, keep, FailingDisk(at, "broken"))
        assert "Input/output error" in str(error)
        assert_old_or_new(folder, steps, step)
        assert_goes_on(folder, step)


def test_a_save_without_room_writes_nothing(tmp_path: Path) -> None:
    class SmallDisk(FailingDisk):
        def free_bytes(self, folder: Path) -> int:
            return 1000

    save(tmp_path, 1, *state_of(1))
    before, disk = names(tmp_path), SmallDisk()
    with pytest.raises(ThriftyError, match=r"needs [\d,]+ bytes and 1,000 are free; [\d,]+ bytes missing"):
        save(tmp_path, 2, *state_of(2), files=disk)
    assert disk.done == []
    assert names(tmp_path) == before


FULL_DISK = """
import subprocess, sys, torch
from pathlib import Path
from thrifty.core.errors import ThriftyError
from thrifty.training.checkpoint import load, save
from thrifty.core.atomic_files import AtomicFiles
from thrifty.training.checkpoint_manifest import verify
from thrifty.training.checkpoint_index import BEST, LATEST, checkpoints, step_of

class Trusting(AtomicFiles):
    def free_bytes(self, folder):
        return super().free_bytes(folder) + (self.lie if hasattr(self, "lie") else 0)

mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True)
big, small = {"w": torch.arange(150_000.0)}, {"w": torch.arange(1_000.0)}
save(mount / "checkpoints", 1, big, {})
for lie in (0, 1 << 30):
    disk = Trusting()
    disk.lie = lie
    try:
        save(mount / "checkpoints", 2, big, {}, files=disk)
        raise SystemExit("it fitted")
    except ThriftyError as error:
        print(error)
    assert sorted(path.name for path in (mount / "checkpoints").iterdir()) == ["LATEST", "step-00000001"]
    assert torch.equal(load(mount / "checkpoints").tensors["w"], big["w"])
save(mount / "checkpoints", 3, small, {})
assert torch.equal(load(mount / "checkpoints").tensors["w"], small["w"])
"""


@pytest.mark.slow
def test_a_real_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of limited size cannot be mounted here without privileges")
    command = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the disk is full") == 2


def test_acknowledged_states_survive_a_kill(tmp_path: Path) -> None:
    acknowledged, chance = PROCESSES.Value("l", 0), random.Random(5)
    for _ in range(30):
        start = acknowledged.value
        process = PROCESSES.Process(target=save_without_end, args=(tmp_path, start + 1, acknowledged))
        process.start()
        deadline = time.monotonic() + 60
        while acknowledged.value == start and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        loaded = load(tmp_path)
        assert loaded.step - acknowledged.value in (0, 1)
        assert loaded.notices == []
        assert loaded.scalars == state_of(loaded.step)[1]
        assert_same(loaded.tensors, state_of(loaded.step)[0])
        acknowledged.value = loaded.step
    assert acknowledged.value > 30


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(ThriftyError, match=r"saving step 1 in .*checkpoints failed"):
        save(tmp_path / "checkpoints", 1, *state_of(1), files=AtomicFiles())
