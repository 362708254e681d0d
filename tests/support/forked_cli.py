"""Commands of `thrifty` that start in milliseconds: each is a fork of a server that has imported all, and used nothing.

What differs from `python -m thrifty` is only that imports are done: it is a process of its own, with its own words,
folder, environment and pipes, that runs the same `__main__`, can be killed, and ends with the same exit codes.
"""

import gc
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import TextIO

import torch
from rank_processes import PROCESSES
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


class Forked:
    """A running command, used like a `subprocess.Popen` in text mode; `stdout` and `stderr` as that takes them. With
    the options of torchrun for `launch` it is several ranks; `anew` where the environment may matter to imports."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        launch: Sequence[str] = (),
        anew: bool = False,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ):
        self.args = ["thrifty", *words]
        self.stdout, output = _end(stdout)
        self.stderr, errors = (None, output) if stderr == subprocess.STDOUT else _end(stderr)
        work = (_train_on_ranks, launch, words) if launch else (_run, words)
        self._process = PROCESSES.Process(target=_start, args=(folder, dict(environment), anew, output, errors, *work))
        self._process.start()
        for connection in {output, errors}:
            connection.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        end, said = time.monotonic() + timeout, {}
        pipes = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [
            Thread(target=lambda name=name, pipe=pipe: said.update({name: pipe.read()}), daemon=True)
            for name, pipe in pipes.items()
            if pipe
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()))
        self.wait(max(0.0, end - time.monotonic()))
        return said.get("stdout", ""), said.get("stderr", "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _end(wanted: int) -> tuple[TextIO | None, Connection]:
    """This process's end of a pipe and the command's, or what the command shall write to instead."""
    if wanted != subprocess.PIPE:
        return None, Connection(os.dup(wanted), readable=False)
    mine, theirs = PROCESSES.Pipe(duplex=False)
    return os.fdopen(os.dup(mine.fileno()), encoding="utf-8"), theirs


def _start(
    folder: Path,
    environment: dict[str, str],
    anew: bool,
    output: Connection,
    errors: Connection,
    work: Callable[..., None],
    *words: Sequence[str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    gc.freeze()  # no collection here need look at all that the server has imported
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    for connection in {output, errors}:
        connection.close()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if anew:
        _forget_ours(environment)
    work(*words)


def _forget_ours(environment: Mapping[str, str]) -> None:
    """Let our own modules be imported again, as they read the environment, and from where it says."""
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    for name in [name for name in sys.modules if name.partition(".")[0] == "thrifty"]:
        del sys.modules[name]


def _run(words: Sequence[str]) -> None:
    sys.argv[1:] = words
    runpy.run_module("thrifty", run_name="__main__", alter_sys=True)


def _train_on_ranks(launch: Sequence[str], words: Sequence[str]) -> None:
    """torchrun's own agent, which forks its ranks."""
    config, _, _ = config_from_args(parse_args([*launch, "thrifty"]))
    record(elastic_launch(replace(config, start_method="fork"), _run_rank))(words)


def _run_rank(words: Sequence[str]) -> None:
    try:
        _run(words)
    except SystemExit as end:
        if end.code:
            raise
