"""Parts of the heartbeat: progress, silence, thread states, rendezvous of ranks."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from command_line import free_port
from meeting_work import meet_and_die

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.training import heartbeat, progress_watchdog
from thrifty.training.failure_verdict import restart_advice
from thrifty.training.fault_detection import FaultDetector
from thrifty.training.progress_watchdog import ProgressWatchdog, StallTimer, TickTimer
from thrifty.training.rendezvous import ProcessIdentity, Rendezvous
from thrifty.training.run_folder import RunFolder
from thrifty.training.run_lock import RunLock
from thrifty.training.stack_state import ThreadState, thread_state

WORKING, WAITING, COMPILING = ThreadState("here"), ThreadState("there", waits=True), ThreadState("far", long=True)


def stepped(durations: list[float], hang: float = 600) -> ProgressWatchdog:
    """Return a watchdog after steps of these seconds, in its next step."""
    made = ProgressWatchdog(hang)
    made.at("step 1", step=True)
    made._steps.extend(durations)
    made.update(WORKING, 1)
    return made


def test_limit_of_known_steps() -> None:
    for durations, limit in (
        ([0.1] * 5, progress_watchdog.FLOOR),
        ([10.0, 20.0, 5.0], 200),
        ([100.0] * 3, 600),
        ([0.1], 600),
    ):
        own = stepped(durations)
        own.update(WORKING, limit - 0.5)
        assert not own.hangs
        own.update(WORKING, 1)
        assert own.hangs


@pytest.mark.parametrize("excused", [WAITING, COMPILING])
def test_waiting_and_compiling_are_neither_work_nor_progress(excused: ThreadState) -> None:
    own = stepped([0.1] * 5)
    own.update(excused, 599)
    assert not own.hangs and not own.is_stuck
    own.update(excused, 2)
    assert not own.is_stuck  # the ranks that watch others speak first
    own.update(excused, progress_watchdog.GRACE)
    assert not own.hangs and own.is_stuck
    own.at("step 2", step=True)
    own.update(WORKING, 1)
    assert not own.is_stuck and own.still == 0


def test_a_start_and_an_evaluation_with_progress_never_hang() -> None:
    own = ProgressWatchdog(hang=5)
    own.update(WORKING, 1)
    own.update(WORKING, 10_000)
    assert not own.hangs and not own.is_stuck
    for _ in range(10):
        own.at("the evaluation after step 3")
        own.update(WORKING, 1)
        own.update(WORKING, 4)
        assert not own.is_stuck


def test_silence_ends_with_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 3600.0, 3601.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    ticks, silence = TickTimer(), StallTimer()
    assert [silence.update("beat 1", ticks.next()) for _ in range(3)] == [0, 1, 1 + progress_watchdog.LONGEST_TICK]
    assert silence.update("beat 2", ticks.next()) == 0


def test_thread_state_from_its_stack() -> None:
    release, loop = threading.Event(), {"on": True}

    def wait() -> None:
        release.wait()

    def work() -> None:
        while loop["on"]:
            sum(range(100))

    threads = [threading.Thread(target=target) for target in (wait, work)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    waiting, working = [thread_state(thread.ident or 0) for thread in threads]
    loop["on"] = False
    release.set()
    assert waiting.waits and not working.waits
    assert working.where.startswith("training/test_heartbeat.py:") and working.where.endswith(" in work")
    assert thread_state(-1) == ThreadState()


def test_a_process_differs_from_a_later_one_of_its_number() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own.is_near and not own.is_gone and ProcessIdentity.from_json(own.as_json()) == own
    assert ProcessIdentity(own.host, own.space, own.pid, own.born - 100).is_gone
    assert not ProcessIdentity("elsewhere", own.space, own.pid, own.born).is_near
    assert not ProcessIdentity(own.host, own.space + 1, own.pid, own.born).is_near


def test_rendezvous_in_a_store_with_stale_entries() -> None:
    """torch's own rendezvous usually fails here: it reads the addresses of ended processes."""
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    names = set()
    for _ in range(3):
        reports = meet_and_die(store.port, ranks=2)
        assert reports[0] == reports[1] and reports[0]["sum"] == 3
        names.add(reports[0]["name"])
    assert len(names) == 3


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ThriftyError, match=r"rank 1 did not connect to 127.0.0.1:\d+ within 0 s"):
        Rendezvous(0.3)


def beats(**of_rank: dict) -> dist.Store:
    """Return a store with these heartbeats of ranks, which are all this process."""
    store = dist.HashStore()
    for rank, changed in enumerate(of_rank.values()):
        beat = {"doing": "step 9", "starting": False, "left": False, "where": "model.py:1 in forward", "waits": False}
        store.set(f"here/{rank}", ProcessIdentity.of(os.getpid()).as_json().decode())
        store.set(f"beat/{rank}", json.dumps(beat | changed))
    return store


def test_the_stuck_rank_that_does_not_wait_is_at_fault() -> None:
    own = stepped([0.1] * 5, hang=60)
    own.update(WAITING, 64)
    waits = {"waits": True, "where": "distributed_c10d.py:1 in all_reduce"}
    verdict = FaultDetector(beats(a=waits, b={}), 0, 2, [], 30, own).find_failure(1, lost=False)
    assert (
        verdict
        and verdict.rank == 1
        and "hangs in step 9: no progress for 64 s, at model.py:1 in forward" in verdict.text
    )
    verdict = FaultDetector(beats(a=waits, b=waits), 0, 2, [], 30, own).find_failure(1, lost=False)
    assert verdict and verdict.rank == 0 and "all ranks wait: in different calls" in verdict.text
    assert FaultDetector(beats(a=waits, b={"starting": True}), 0, 2, [], 30, own).find_failure(1, lost=False) is None


def test_a_finished_rank_is_not_reported() -> None:
    for left, blamed in ((False, 1), (True, None)):
        findings = FaultDetector(beats(a={}, b={"left": left}), 0, 2, [], 30, ProgressWatchdog(600))
        verdicts = [findings.find_failure(tick, lost=False) for tick in (1, 29, 2)]
        assert verdicts[:2] == [None, None] and (verdicts[2] and verdicts[2].rank) == blamed


def test_advice_depends_on_the_restarts_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert "(restart 2 of at most 2)" in restart_advice()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert "thrifty resume" in restart_advice()


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan"])
def test_a_limit_that_is_no_positive_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_SILENCE", value)
    with pytest.raises(UsageError, match="THRIFTY_SILENCE"), heartbeat.run_heartbeat(lambda: None):
        pass


def test_a_job_is_recognized_by_one_common_agent(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, ["agent a", "agent b"]) as run:
        assert not run.again
        run.write_text("recipe.toml", "seed = 0\n")
    with RunFolder.create(path, ["agent b", "agent c"]) as run:
        assert run.again
    for agents in (["agent a"], []):
        with pytest.raises(UsageError, match="exists already"):
            RunFolder.create(path, agents)
    with RunFolder.open(path).lock(["agent d"]) as run:
        assert not run.again
    with RunFolder.create(path, ["agent d"]) as run:
        assert run.again


def test_a_folder_without_a_recipe_can_be_reused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", ["agent a"]).close()
    assert not RunFolder.create(tmp_path / "run", ["agent b"]).again


def test_a_lock_of_another_host_is_freed_by_its_own_job_only(tmp_path: Path) -> None:
    left = json.dumps({"pid": 1, "host": "a-host-that-is-lost", "started": 0.0})
    (tmp_path / "lock").write_text(left)
    with pytest.raises(UsageError, match="a-host-that-is-lost"):
        RunLock(tmp_path / "lock")
    taken = RunLock(tmp_path / "lock", is_same_job=True)
    assert "taken over" in taken.notice
    taken.release()
