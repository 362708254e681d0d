"""A run folder is created once, written by one process, and readable after a crash at any moment."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import PROCESSES
from run_starters import append_forever, go_on, start

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import IntegrityError, ThriftyError, UsageError
from thrifty.training.run_folder import RunFolder


def existing_run(path: Path) -> Path:
    with RunFolder.create(path) as run:
        run.write_text("recipe.toml", "seed = 1\n")
    return path


def test_a_new_run_never_changes_a_folder_with_files(tmp_path: Path) -> None:
    path = existing_run(tmp_path / "mine")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UsageError, match=r"mine' exists already\n.*pass another name=…; or thrifty.resume"):
        RunFolder.create(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(UsageError, match="exists already"):
        RunFolder.create(tmp_path / "photos")
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["cat.png"]


def test_the_folder_of_a_run_without_files_can_be_reused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "mine").close()
    RunFolder.create(tmp_path / "mine").close()


def test_a_refused_start_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="refused"), RunFolder.create(tmp_path / "runs" / "new"):
        raise UsageError("refused")
    assert not (tmp_path / "runs" / "new").exists()
    with pytest.raises(UsageError, match="refused"), RunFolder.create(tmp_path / "runs" / "new") as run:
        run.write_text("recipe.toml", "seed = 0\n")
        raise UsageError("refused")
    assert run.recipe.is_file()


def test_unnamed_runs_are_numbered(tmp_path: Path) -> None:
    with RunFolder.create_numbered(tmp_path / "text") as first:
        first.write_text("recipe.toml", "")
        with RunFolder.create_numbered(tmp_path / "text") as second:  # the first is in use
            second.write_text("recipe.toml", "")
    (tmp_path / "text-3").write_text("a file of the user")
    assert RunFolder.create_numbered(tmp_path / "text").path == tmp_path / "text-4"
    assert [first.name, second.name] == ["text", "text-2"]


def test_restarted_job_finds_its_numbered_folder(tmp_path: Path) -> None:
    existing_run(tmp_path / "text")
    for _ in range(2):
        with RunFolder.create_numbered(tmp_path / "text", agents=["host/1"]) as run:
            run.write_text("recipe.toml", "")
            assert run.name == "text-2"
    assert run.again


def test_a_file_instead_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="mine' is a file"):
        RunFolder.create(tmp_path / "mine")


def test_a_missing_run_suggests_the_nearest_name(tmp_path: Path) -> None:
    existing_run(tmp_path / "shakespeare")
    with pytest.raises(UsageError, match="did you mean 'shakespeare'"):
        RunFolder.open(tmp_path / "shakespear")


def test_exactly_one_of_many_starters_wins(tmp_path: Path) -> None:
    starters = 20
    barrier, results = PROCESSES.Barrier(starters), PROCESSES.Queue()
    processes = [PROCESSES.Process(target=start, args=(tmp_path / "mine", barrier, results)) for _ in range(starters)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert outcomes.count("won") == 1
    refused = [text for text in outcomes if text != "won"]
    assert [text for text in refused if "is in use by" not in text and "exists already" not in text] == []


def test_exactly_one_process_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    path, starters = existing_run(tmp_path / "mine"), 20
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_owner(path, pid=dead.pid)
    barrier, results = PROCESSES.Barrier(starters), PROCESSES.SimpleQueue()
    processes = [PROCESSES.Process(target=go_on, args=(path, barrier, results)) for _ in range(starters)]
    for process in processes:
        process.start()
    outcomes = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert sorted(text for text in outcomes if "is in use by" not in text) == [
        f"process {dead.pid} ended without releasing the lock of this run, which was taken over"
    ]


def write_owner(path: Path, **owner: Any) -> None:
    facts = {"pid": os.getpid(), "host": os.uname().nodename, "started": 1.0} | owner
    (path / "lock").write_text(json.dumps(facts))


def test_the_process_with_the_lock_is_named(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "mine") as run:
        run.write_text("recipe.toml", "")
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()} on {os.uname().nodename}"):
            RunFolder.open(tmp_path / "mine").lock()
    with RunFolder.open(tmp_path / "mine").lock() as run:
        assert run.notice == ""


def test_a_later_process_with_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    path = existing_run(tmp_path / "mine")
    write_owner(path, pid=os.getpid(), started=1.0)
    with RunFolder.open(path).lock() as run:
        assert "ended without releasing the lock of this run" in run.notice


def test_an_owner_on_another_machine_is_never_taken_over(tmp_path: Path) -> None:
    path = existing_run(tmp_path / "mine")
    write_owner(path, host="elsewhere")
    with pytest.raises(
        UsageError, match=r"in use by process \d+ on elsewhere\n.*the process no longer runs there, remove"
    ):
        RunFolder.open(path).lock()
    (path / "lock").unlink()
    RunFolder.open(path).lock().close()


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 40, b"[]", b'{"pid": "x", "host": 1}'])
def test_a_lock_file_torn_by_a_crash_is_no_obstacle(content: bytes, tmp_path: Path) -> None:
    path = existing_run(tmp_path / "mine")
    (path / "lock").write_bytes(content)
    RunFolder.open(path).lock().close()


def test_the_last_record_of_each_step_counts(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "mine") as run:
        for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)):
            run.append({"kind": "step", "step": step, "loss": loss})
        run.append({"kind": "evaluation", "step": 2, "loss": 9.0})
        run.append({"kind": "notice", "step": 2, "text": "one"})
        run.append({"kind": "notice", "step": 2, "text": "two"})
        run.seal_records()
        records = run.read_records()
    assert [(record["kind"], record["step"], record.get("loss", record.get("text"))) for record in records] == [
        ("step", 1, 5.0),
        ("step", 3, 3.0),
        ("step", 2, 4.5),
        ("evaluation", 2, 9.0),
        ("notice", 2, "one"),
        ("notice", 2, "two"),
    ]


@given(cut=st.integers(1, 40))
def test_a_cut_last_line_is_skipped_and_overwritten(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"kind": "step", "step": step, "text": "é" * 3}) + "\n" for step in (1, 2)]
    content = "".join(lines).encode()
    (path / "records.jsonl").write_bytes(content[: len(content) - min(cut, len(lines[1].encode()))])
    run = RunFolder(path)
    assert [record["step"] for record in run.read_records()] == [1]
    run.append({"kind": "step", "step": 3})
    assert [record["step"] for record in run.read_records()] == [1, 3]
    assert all(json.loads(line) for line in (path / "records.jsonl").read_text().splitlines())
    run.close()
    shutil.rmtree(path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"kind": "step", "step": 1}\n{"kind": "st\n{"kind": "step", "step": 3}\n')
    with pytest.raises(IntegrityError, match=r"line 2 of .*records\.jsonl' is damaged"):
        RunFolder(tmp_path).read_records()


def test_records_are_json_for_every_reader(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "mine") as run:
        run.append({"kind": "step", "step": 1, "loss": float("nan"), "notes": {"peak": float("inf"), "list": [-0.5]}})
        text = run.records.read_text()
    assert text == '{"kind": "step", "step": 1, "loss": null, "notes": {"peak": null, "list": [-0.5]}}\n'


def test_records_of_a_killed_process_are_whole_and_in_order(tmp_path: Path) -> None:
    for _ in range(5):
        process = PROCESSES.Process(target=append_forever, args=(tmp_path,))
        process.start()
        while not (tmp_path / "records.jsonl").exists():
            time.sleep(0.001)
        time.sleep(0.05)
        process.kill()
        process.join()
        steps = [record["step"] for record in RunFolder(tmp_path).read_records()]
        assert steps == list(range(1, len(steps) + 1))
        assert steps
        (tmp_path / "records.jsonl").unlink()


FULL_DISK = """
import subprocess, sys
from pathlib import Path
from thrifty.core.errors import ThriftyError
from thrifty.core.atomic_files import AtomicFiles
from thrifty.training.run_folder import RunFolder
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", sys.argv[1]], check=True)
with RunFolder.create(Path(sys.argv[1]) / "mine") as run:
    run.write_json("summary", {"status": "old"})
    try:
        for step in range(10_000):
            run.append({"kind": "step", "step": step, "text": "x" * 99})
    except ThriftyError as error:
        print(error)
    assert [record["step"] for record in run.read_records()] == list(range(step))
    assert run.records.read_bytes().endswith(b"\\n")
    try:
        run.write_json("summary", {"status": "x" * 9999})
    except ThriftyError as error:
        print(error)
    assert run.read_json("summary") == {"status": "old"}
"""


def test_a_full_disk_is_explained_and_leaves_whole_lines(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of limited size cannot be mounted here without privileges")
    command = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be written: " + os.strerror(errno.ENOSPC)) == 2
    assert done.stdout.count("free some space") == 2


def test_small_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "mine") as run:
        run.write_json("summary", {"status": "finished", "loss": float("nan")})
        assert run.read_json("summary") == {"status": "finished", "loss": None}
        with pytest.raises(IntegrityError, match=r"no origins\.json"):
            run.read_json("origins")
        (run.path / "summary.json").write_text("{")
        with pytest.raises(IntegrityError, match=r"summary\.json' is damaged"):
            run.read_json("summary")
        run.path.joinpath("summary.json").unlink()
        (run.path / "summary.json").mkdir()
        with pytest.raises(ThriftyError, match=r"summary\.json' cannot be written"):
            run.write_json("summary", {})


@pytest.mark.parametrize("what", ["moved", "deleted", "replaced"])
def test_nothing_is_written_after_the_folder_was_moved(what: str, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        run.append({"kind": "step", "step": 1})
        if what == "deleted":
            shutil.rmtree(tmp_path / "run")
        else:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        if what == "replaced":
            shutil.copytree(tmp_path / "elsewhere", tmp_path / "run")
        there = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for write in (lambda: run.append({"kind": "step", "step": 2}), lambda: run.write_json("summary", {})):
            with pytest.raises(ThriftyError, match="was moved or deleted during the run"):
                write()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == there


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_reported(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    with RunFolder.create(tmp_path / "run") as run:
        assert "has no locks" in run.notice
        run.append({"kind": "step", "step": 1})
        with pytest.raises(UsageError, match="is in use by process"):  # refused by the file, not by the lock
            RunFolder(tmp_path / "run").lock()


@pytest.mark.parametrize(("name", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EDQUOT), ("open", errno.EROFS)])
def test_an_unwritable_lock_is_reported(name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = getattr(os, name)

    def refused(*args: Any) -> Any:
        if name == "pwrite" or str(args[0]).endswith("lock"):
            raise OSError(code, os.strerror(code))
        return plain(*args)

    monkeypatch.setattr(os, name, refused)
    with pytest.raises(ThriftyError, match=f"lock' cannot be written: {os.strerror(code)}") as told:
        RunFolder.create(tmp_path / "run")
    assert ("free some space" in told.value.fix) == (code != errno.EROFS)


@pytest.mark.parametrize("name", ["lock", "records.jsonl", "tokenizer.json", "checkpoints", "plots", "report.html"])
def test_a_run_folder_with_a_link_is_refused(tmp_path: Path, name: str) -> None:
    path, outside = existing_run(tmp_path / "mine"), tmp_path / "outside"
    outside.write_text("precious, without a last line")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(outside)
    with pytest.raises(UsageError, match=f"{name}' is a symbolic link"):
        RunFolder.open(path).lock()
    with pytest.raises(FileExistsError):
        AtomicFiles().create_file(path / name)
    assert outside.read_text() == "precious, without a last line"


@pytest.mark.parametrize("name", ["records.jsonl", "checkpoints/.LATEST.0f1e.partial"])
def test_a_pipe_in_a_run_folder_is_refused_without_a_hang(tmp_path: Path, name: str) -> None:
    path = existing_run(tmp_path / "mine")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(UsageError, match=f"{name}' is a pipe or a device.*\n  fix: rm {path / name}"):
        RunFolder.open(path).lock()


def test_leftovers_of_a_kill_are_removed_with_the_lock(tmp_path: Path) -> None:
    path = existing_run(tmp_path / "mine")
    strays = [path / "checkpoints" / f"step-00000004.{kind}-0f1e" for kind in ("partial", "removed")]
    for stray in strays:
        stray.mkdir(parents=True)
        (stray / "tensors.safetensors").write_text("half")
    strays += [path / ".summary.json.0f1e.partial", path / "checkpoints" / ".LATEST.0f1e.partial"]
    for stray in strays[2:]:
        stray.write_text("half")
    (path / "checkpoints" / "mine.txt").write_text("not ours to remove")
    with RunFolder.open(path).lock():
        assert not [stray for stray in strays if stray.exists()]
    assert (path / "checkpoints" / "mine.txt").exists()
