"""Start of the ranks of a run on this machine; each rank calls the same function. `python -m` of this module is the
program of one rank."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from thrifty.core.child_python import child_environment
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError
from thrifty.machine.cpu_features import usable_cores
from thrifty.training.process_launch import settings
from thrifty.training.rendezvous import LOOPBACK, is_srun_step, loopback_store
from thrifty.training.sent_objects import read_value, refuse_start_during_import, write_value
from thrifty.training.stop_signals import SIGNALS

RANKS_PER_CORE = 8
"""Maximum number of ranks per core. More ranks, of at least 200 MB each, stop a machine."""
PATIENCE = 60.0
"""Seconds after a rank's failure until the remaining ranks are killed."""


def on_ranks(count: int, work: Callable[..., dict[str, Any]], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Call `work` in `count` processes of this machine, and return the result of rank 0. If `count` is 1, or if a
    launcher has already started the processes, call `work` in this process. Raise UsageError for arguments that cannot
    be sent to another process. If a rank fails, raise the error of the first failed rank."""
    if count < 1:
        raise UsageError(f"ranks is {count}, below the limit of 1", fix="--ranks 1")
    refuse_start_during_import()
    if count == 1 or "RANK" in os.environ or is_srun_step():
        return work(*arguments, **options)
    if count > (most := RANKS_PER_CORE * len(usable_cores())):
        what = f"ranks is '{count}', above the limit of {most} processes on this machine"
        raise InfeasibleError(what, fix=f"--ranks {len(usable_cores())}")
    with tempfile.TemporaryDirectory(prefix="thrifty-ranks-") as folder:
        call, store = Path(folder, "call"), loopback_store()
        write_value((work, arguments, options), call)
        variables = settings(count) | {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        codes = _exit_codes([_start(call, rank, variables) for rank in range(count)])
        with suppress(OSError):
            answer = json.loads(_answer(call).read_text())
            if "result" in answer:
                return answer["result"]
            error = ThriftyError(answer["what"], answer["fix"])
            error.exit_code = answer["exit_code"]
            raise error
    failed = next(rank for rank, code in enumerate(codes) if code)
    raise ThriftyError(f"rank {failed} ended with exit code {codes[failed]}", fix="read what the rank printed above")


def _start(call: Path, rank: int, variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(call)],
        stdin=subprocess.PIPE,  # closed when this process ends, see end_with_starter
        env=child_environment(**variables, RANK=str(rank), LOCAL_RANK=str(rank)),
        start_new_session=True,  # an interrupt at the terminal reaches only this process, which forwards it once
    )


def _exit_codes(processes: "list[subprocess.Popen[bytes]]") -> list[int]:
    """Wait for all processes and return their exit codes. PATIENCE seconds after a failure, kill the remaining
    processes."""
    with _forwarded_signals(processes):
        end = float("inf")
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                end = min(end, time.monotonic() + PATIENCE)
            if time.monotonic() > end:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    return [process.returncode for process in processes]


@contextmanager
def _forwarded_signals(processes: "list[subprocess.Popen[bytes]]") -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, forward) for number in SIGNALS if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_starter() -> None:
    """End this process, as after SIGTERM, when its standard input closes because the parent process has died."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _answer(call: Path) -> Path:
    return call.with_suffix(".json")


def _write_answer(call: Path, answer: dict[str, Any]) -> None:
    aside = call.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(answer))
    with suppress(FileExistsError, FileNotFoundError):  # an answer exists, or the parent process has died
        os.link(aside, _answer(call))


def _serve(call: Path) -> int:
    end_with_starter()
    try:
        work, arguments, options = read_value(call)
        result = work(*arguments, **options)
    except ThriftyError as error:
        _write_answer(call, {"what": error.what, "fix": error.fix, "exit_code": error.exit_code})
        return error.exit_code
    if os.environ["RANK"] == "0":
        _write_answer(call, {"result": result})
    return 0


if __name__ == "__main__":
    code = _serve(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for the thread that reads standard input
