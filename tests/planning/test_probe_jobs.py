"""Probes in separate processes: timings, and reasons of failures."""

import time
from pathlib import Path

import psutil
import pytest
from planned_runs import BATCH, TIMING

from thrifty.planning.probe_jobs import ProbeError, ProbeJob, probe_in_process

ANSWERS = f"""
import sys
from pathlib import Path
from thrifty.planning.probe_jobs import write_probe_answer
write_probe_answer(Path(sys.argv[1]), {TIMING.as_dict()!r})
"""
DIES = """
import os, sys
from pathlib import Path
from thrifty.planning import probe_jobs as probes
probes.json.dump = lambda found, file: (file.write("{"), file.flush(), os._exit(3))
probes.write_probe_answer(Path(sys.argv[1]), {})
"""
REFUSES = """
import os, sys
from pathlib import Path
from thrifty.planning.probe_jobs import write_probe_answer
write_probe_answer(Path(sys.argv[1]), {"refused": "the loss is nan"})
sys.exit("something else")
"""
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
BREAKS = "print('much ' * 50000, file=__import__('sys').stderr)\nraise ValueError('no such thing')"
SILENT = "pass"
HANGS = "import os, sys, time\nopen(os.environ['PIDS'], 'a').write(f'{os.getpid()} ')\ntime.sleep(60)"


def job(ranks: int) -> ProbeJob:
    mesh = {"replicate": ranks if ranks > 1 else 0, "shard": 0, "tensor": 1, "pipeline": 1}
    return ProbeJob({"name": "a", "mesh": mesh}, 10, (BATCH,), 1, 1.0, (5.0, 6.0))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the module `a_probe`, which the process of a probe runs."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "a_probe.py"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_probes_return_their_timing(module: Path, ranks: int) -> None:
    module.write_text(ANSWERS)
    assert job(ranks).ranks == ranks
    assert probe_in_process("a_probe")(job(ranks)) == TIMING


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("program", "ranks", "message"),
    [
        (REFUSES, 1, "^the loss is nan$"),
        (REFUSES, 2, "^the loss is nan$"),
        (KILLED, 1, "killed, probably because the system ran out of memory"),
        (KILLED, 2, "killed, probably because the system ran out of memory"),
        (BREAKS, 1, "ValueError: no such thing"),
        (DIES, 1, "ended with exit code 3"),
        (SILENT, 1, "ended with exit code 0"),
    ],
)
def test_failed_probes_report_the_reason(module: Path, program: str, ranks: int, message: str) -> None:
    module.write_text(program)
    with pytest.raises(ProbeError, match=message):
        probe_in_process("a_probe")(job(ranks))


@pytest.mark.slow
def test_all_ranks_are_killed_at_the_time_limit(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text(HANGS)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    with pytest.raises(ProbeError, match="not complete within 30 s"):
        probe_in_process("a_probe", limit=lambda: 30.0)(job(2))
    started = (tmp_path / "pids").read_text().split()
    assert len(started) == 2
    until = time.monotonic() + 10
    while any(map(lives, started)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(lives, started))


def lives(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
