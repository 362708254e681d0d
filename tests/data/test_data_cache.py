import errno
import os
import select
import signal
import subprocess
import sys

import pytest

from thrifty.core.atomic_folders import write_aside
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.data.data_cache import build_folder, lock_folder
from thrifty.models.hf_folder import written_aside

KILLED_WRITER = """
import importlib, os, signal, sys
from pathlib import Path
with getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(Path(sys.argv[3])) as aside:
    (aside / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""

WAIT_FOR_THE_LOCK = """
import sys
from pathlib import Path
from thrifty.data.data_cache import lock_folder
print("waiting", flush=True)
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "set"
    with pytest.raises(KeyError), build_folder(folder) as aside:
        (aside / "half").write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with build_folder(folder) as aside:
        (aside / "whole").write_text("whole")
        assert not folder.exists()
    assert [path.name for path in folder.iterdir()] == ["whole"] and list(tmp_path.iterdir()) == [folder]


def test_a_new_folder_replaces_the_old_one(tmp_path):
    for name in ("old", "new"):
        with build_folder(tmp_path / "set") as aside:
            (aside / name).write_text(name)
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["new"]


def test_full_disk_is_refused_and_keeps_the_old_folder(tmp_path):
    with build_folder(tmp_path / "set") as aside:
        (aside / "old").write_text("old")
    with pytest.raises(ThriftyError, match="disk is full") as caught, build_folder(tmp_path / "set"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "THRIFTY_CACHE" in caught.value.fix
    assert (tmp_path / "set" / "old").is_file()


@pytest.mark.slow
def test_lock_is_exclusive_and_released_by_a_kill(tmp_path):
    def start():
        command = [sys.executable, "-c", WAIT_FOR_THE_LOCK, str(tmp_path / "set")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first:
        assert [first.stdout.readline(), first.stdout.readline()] == ["waiting\n", "held\n"]
        with start() as second:
            assert second.stdout.readline() == "waiting\n"
            assert not select.select([second.stdout], [], [], 0.3)[0]
            first.kill()
            assert second.stdout.readline() == "held\n"
            second.stdin.close()


@pytest.mark.parametrize("write", [build_folder, written_aside])
def test_leftovers_of_killed_writers_are_removed(tmp_path, write):
    dead = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, write.__module__, write.__name__, str(tmp_path / "set")], check=False
    )
    assert dead.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.mkfifo(tmp_path / f".set{left.suffix}0")
    with write_aside(tmp_path / "set") as living:
        with write(tmp_path / "set"):
            assert not left.exists() and living.exists()
        (tmp_path / "set").rename(tmp_path / "moved")
    assert (tmp_path / "set").is_dir()


def test_pipe_in_place_of_a_lock_is_refused(tmp_path):
    os.mkfifo(tmp_path / ".set.lock")
    with pytest.raises(UsageError, match="cannot write to the cache folder"), lock_folder(tmp_path / "set"):
        pass
