"""The rendezvous of the ranks of one start: a store with a name prefix that no earlier start of the same job has used.

torchrun keeps one store over all restarts. In that store torch would read stale entries of earlier processes, such as
addresses without a listener. The ranks therefore first agree on a new name, which is the prefix of all entries.
"""

import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psutil
import torch.distributed as dist

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.machine.process_start import is_running, process_start

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)
"""Ports for the rendezvous under srun; the job's number selects one."""
_CURRENT = "thrifty/meeting"
_CONNECTING = timedelta(seconds=60)


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process. A later process with the same PID has another identity."""

    host: str
    space: int
    """PID namespace: hosts with the same name may be containers with separate PIDs."""
    pid: int
    born: float

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        space = Path("/proc/self/ns/pid")
        number = space.stat().st_ino if space.exists() else 0
        return cls(socket.gethostname(), number, pid, born=process_start(pid) or 0.0)

    @classmethod
    def from_json(cls, text: bytes) -> "ProcessIdentity":
        return cls(*json.loads(text))

    def as_json(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"

    @property
    def is_near(self) -> bool:
        """True if this process can observe the other process: same host and same PID namespace."""
        here = ProcessIdentity.of(os.getpid())
        return (self.host, self.space) == (here.host, here.space)

    @property
    def is_gone(self) -> bool:
        """True if the process is near and has ended."""
        return not is_running(self.pid, self.born)


def current_agent() -> str:
    """Return the identity of the torchrun process that started this one; "" for any other start."""
    return ProcessIdentity.of(os.getppid()).as_json().decode() if "TORCHELASTIC_RUN_ID" in os.environ else ""


def end_agent(seconds: float) -> None:
    """Kill torchrun on this machine after the network is lost. Without a network, torchrun of torch 2.13 waits for its
    store without a timeout and ignores signals."""
    with suppress(psutil.Error):
        agent = psutil.Process(os.getppid())
        if agent.pid == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        agent.terminate()
        with suppress(psutil.TimeoutExpired):
            agent.wait(seconds)
            return
        agent.kill()


def is_srun_step() -> bool:
    """Return True if srun started this process as one of several."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def take_srun_ranks() -> None:
    """Set torchrun's environment variables from srun's variables, unless torchrun's are set. The store is on the first
    host of the srun step."""
    if "RANK" in os.environ or not is_srun_step():
        return
    hosts = os.environ.get("SLURM_STEP_NODELIST", LOOPBACK)
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts).partition(",")[0]  # node[03-05,09] begins with node03
    step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
    local = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ["SLURM_STEP_NUM_TASKS"])  # such as 2(x3),1
    variables = {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", local)[0],
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORTS.start + zlib.crc32(step.encode()) % len(PORTS)),
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)


class Rendezvous:
    """The connection of all ranks of one start. Each rank creates one instance."""

    def __init__(self, seconds: float):
        """Wait up to `seconds` for all ranks to connect. Raise ThriftyError with the number of a missing rank, or
        UsageError with the missing environment variables."""
        if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            what = f"RANK is set in the environment, as for one of several ranks, but not {' or '.join(missing)}"
            raise UsageError(what, fix="start with: torchrun --nproc-per-node 2 -m thrifty train …; or unset RANK")
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._store, self._seconds = connect(host=_is_host(self.rank)), seconds
        self.process = ProcessIdentity.of(os.getpid())
        self._word = self.process.as_json()
        self.name = self._call() if self.rank == 0 else self._answer()

    @property
    def near(self) -> list[int]:
        """The other ranks on this machine."""
        first = self.rank - int(os.environ.get("LOCAL_RANK", 0))
        return [rank for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1))) if rank != self.rank]

    @property
    def is_first_near(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def connection(self) -> dist.Store:
        """Return a new connection to the store of this rendezvous. Threads with separate connections do not block each
        other."""
        return dist.PrefixStore(self.name, connect(host=False))

    def _call(self) -> str:
        name = uuid4().hex
        self._store.set(f"{name}/here/0", self._word)
        self._store.set(_CURRENT, name)
        for other in range(1, self.ranks):
            self._wait(lambda here=f"{name}/here/{other}": self._store.check([here]), f"rank {other} did not connect")
            self._store.set(f"{name}/seen/{other}", self._store.get(f"{name}/here/{other}"))
        return name

    def _answer(self) -> str:
        """Return the name of the rendezvous once rank 0 has acknowledged this process. The name read first may belong
        to an earlier start."""
        self._wait(self._is_seen, "rank 0 did not connect")
        return self._store.get(_CURRENT).decode()

    def _is_seen(self) -> bool:
        if not self._store.check([_CURRENT]):
            return False
        name = self._store.get(_CURRENT).decode()
        self._store.set(f"{name}/here/{self.rank}", self._word)
        seen = f"{name}/seen/{self.rank}"
        return self._store.check([seen]) and self._store.get(seen) == self._word

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        end, pause = time.monotonic() + self._seconds, 0.01
        while not condition():
            if time.monotonic() > end:
                raise ThriftyError(
                    f"{failure} to {self.address} within {self._seconds:.0f} s",
                    fix="read the output of that rank, and check that its host can reach this address",
                )
            time.sleep(pause)  # short enough to handle a signal soon
            pause = min(1.5 * pause, 0.5)


def _is_host(rank: int) -> bool:
    """Return True if this rank hosts the store: rank 0, unless torchrun hosts one."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect(host: bool) -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host and address in (LOOPBACK, "localhost"):
        return loopback_store(port)
    return dist.TCPStore(address, port, is_master=host, timeout=_CONNECTING, multi_tenant=True)


def loopback_store(port: int = 0) -> dist.TCPStore:
    """Return a store that listens only on the loopback interface; torch's own store accepts connections on all
    interfaces. Stores that this process opens later at the same port share this listener."""
    listening = socket.create_server((LOOPBACK, port))
    port = listening.getsockname()[1]
    options = {"is_master": True, "timeout": _CONNECTING, "multi_tenant": True}
    return dist.TCPStore(LOOPBACK, port, master_listen_fd=listening.detach(), **options)
