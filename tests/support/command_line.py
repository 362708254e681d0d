"""The command line as a user has it: real processes of `python -m thrifty` in a folder with a small real corpus."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fast_techniques import WITHOUT_FAST
from forked_cli import Forked
from torch import Tensor

from thrifty.training.checkpoint import load

MODULES = ("bisect", "heapq", "queue", "sched", "shlex", "textwrap")
TINY = {
    "model.preset": "llama-nano",
    "model.width": 32,
    "model.depth": 2,
    "data.vocabulary": 320,
    "data.length": 32,
    "data.batch": 8,
    "evaluation.examples": 8,
}


def write_corpus(folder: Path) -> None:
    """A few real files of the standard library, about 80 kB."""
    folder.mkdir()
    for name in MODULES:
        source = Path(sysconfig.get_path("stdlib"), f"{name}.py")
        (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


def settings(**changed: Any) -> list[str]:
    """--set options of a run that starts and trains in seconds; `data__batch=4` is data.batch."""
    values = TINY | {name.replace("__", "."): value for name, value in changed.items()}
    return [word for path, value in values.items() for word in ("--set", f"{path}={json.dumps(value)}")]


Running = subprocess.Popen[str] | Forked
"""A command that was started."""


@dataclass
class CommandLine:
    """Runs `thrifty` in `folder`; environment variables of `environment` come on top of the test's own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    """True starts a new Python process for each command and rank, instead of a fork. Descriptors other than pipes
    require it.
    """

    def variables(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **self.environment}

    def start(self, *words: str | Path, ranks: int = 0, restarts: int = 0, **options: Any) -> Running:
        """Start a process and return it; with `ranks` under torchrun, which restarts them `restarts` times."""
        launch: list[str] = []
        if ranks:
            launch = ["--nnodes=1", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
            launch += [f"--master-port={free_port()}", f"--max-restarts={restarts}"]
        if not (self.fresh or options.keys() - {"stdout", "stderr"}):
            anew = bool(self.environment.keys() - {"THRIFTY_CACHE"})
            return Forked([*map(str, words)], self.folder, self.variables(), launch, anew, **options)
        command = [sys.executable, "-m"]
        if ranks:
            command += ["torch.distributed.run", *launch, "-m"]
        return subprocess.Popen(
            [*command, "thrifty", *map(str, words)],
            cwd=self.folder,
            env=self.variables(),
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def __call__(
        self, *words: str | Path, exit_code: int = 0, ranks: int = 0, timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """A finished process, whose exit code must be the one expected."""
        process = self.start(*words, ranks=ranks, **options)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            kill(process)
        assert process.returncode == exit_code, f"exit {process.returncode}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def json(self, *words: str | Path, **options: Any) -> Any:
        return json.loads(self(*words, "--json", **options).stdout)

    def train(self, name: str, *words: str, steps: int = 6, plain: bool = True, **options: Any) -> Any:
        """The summary of a run that was trained to its end."""
        changed = {key: options.pop(key) for key in list(options) if "__" in key}
        return self.json(*self.recipe(name, *words, steps=steps, plain=plain, **changed), **options)

    def recipe(self, name: str, *words: str, steps: int = 6, plain: bool = True, **changed: Any) -> list[str]:
        """The words of a `train` command of a tiny run."""
        without = WITHOUT_FAST if plain else ()
        data = (self.folder / "corpus").resolve()
        start = ["train", "text", "--name", name, "--data", str(data), "--budget", f"{steps}steps"]
        return [*start, *settings(**changed), *without, *words]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of a run's newest checkpoint."""
        return load(self.run(name) / "checkpoints").tensors

    def records(self, name: str, kind: str = "step") -> list[dict[str, Any]]:
        """The lines of one kind as they stand in the file, the cut last line of a killed process left out."""
        lines = (self.run(name) / "records.jsonl").read_bytes().split(b"\n")[:-1]
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


def beside(common_folder: Path) -> CommandLine:
    """The command line in a new folder below this one, with its corpus."""
    folder = Path(tempfile.mkdtemp(dir=common_folder))
    (folder / "corpus").symlink_to(common_folder / "corpus")
    return CommandLine(folder)


def family(process: Running) -> list[psutil.Process]:
    """The process and all it started: torchrun gives each rank a session of its own."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    return []


def rank_processes(process: Running) -> list[int]:
    """The process numbers of the ranks that torchrun has started, which it starts in order."""
    return sorted(member.pid for member in family(process) if member.pid != process.pid)


def kill(process: Running) -> None:
    """SIGKILL to a process and all that it started."""
    members = family(process)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def wait_until(there: Callable[[], Any], process: Running | None = None, seconds: float = 60) -> bool:
    """Wait until a condition holds or the process ends, and return whether it held. Fails after the timeout."""
    end = time.monotonic() + seconds
    while not there():
        if process is not None and process.poll() is not None:
            return bool(there())
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)
    return True


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"


def assert_same_curve(found: list[dict], expected: list[dict]) -> None:
    assert [step["tokens"] for step in found] == [step["tokens"] for step in expected]
    for kind in ("loss", "gradient_norm"):
        assert [step[kind] for step in found] == pytest.approx([step[kind] for step in expected], rel=1e-5)
