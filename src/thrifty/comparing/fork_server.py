"""Server that forks the processes of runs. It has imported torch, so that a run starts without these imports.

The server never computes: it has one thread and no CUDA context. A fork is a process of its own, with its own memory
peak, session, standard input and output. The program of this module is the server; `ForkServer` is its client.
"""

import gc
import json
import os
import random
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import IO

from thrifty.core.child_python import child_environment

IMPORTED = ("thrifty.comparing.run_process", "torch._dynamo", "torch.distributed.fsdp", "sympy")
"""Modules that the server imports before the first fork. `torch._inductor` starts threads and is not among them."""
CAN_FORK = sys.platform == "linux"
"""True if a process that has imported torch can be forked."""
LONGEST = 2**16
"""Maximum number of bytes of a message to the server."""


class ForkedProcess:
    """Process of a run, with `stdin` and `wait` like a `subprocess.Popen`."""

    def __init__(self, server: "ForkServer", stdin: IO[bytes]):
        self.stdin = stdin
        self._server, self._code = server, None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._code = self._server.wait(timeout)
        return self._code


class ForkServer:
    """Client of a server that runs one forked process at a time. `output` is the file to which the server writes an
    error of its imports. `variables` are environment variables of the server and its forks."""

    def __init__(self, output: IO[str], **variables: str):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(**variables),
                start_new_session=True,  # an interrupt at the terminal must not end the server before the run has saved
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, arguments: Sequence[str], output: IO[str]) -> ForkedProcess:
        """Start `thrifty.comparing.run_process` with these arguments, in a fork that writes to `output`."""
        reading, writing = os.pipe()
        process = ForkedProcess(self, os.fdopen(writing, "wb"))
        try:
            socket.send_fds(self._socket, [json.dumps(arguments).encode()], [reading, output.fileno()])
        except OSError:  # the server has ended; `wait` returns its exit code
            pass
        finally:
            os.close(reading)
        return process

    def wait(self, timeout: float | None) -> int:
        """Return the exit code of the fork, or of the server if the server ended first. Raise TimeoutExpired after
        `timeout` seconds."""
        if not select.select([self._socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a run", timeout or 0.0)
        code = self._socket.recv(LONGEST)
        return int(code) if code else self._process.wait()

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait()


def _serve(connection: socket.socket) -> None:
    """Fork a process for each message; reply with its exit code. Return when the client has closed the connection or
    died."""
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of everything that was imported
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        try:
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            return


def _run(arguments: list[str], stdin: int, output: int) -> None:
    """Become the process of a run; never return."""
    code = 1
    try:
        os.setsid()
        for number, descriptor in enumerate((stdin, output, output)):
            os.dup2(descriptor, number)
        os.closerange(3, max(stdin, output) + 1)
        import numpy as np

        from thrifty.comparing import run_process

        random.seed()  # otherwise all forks would have the same unseeded random values
        np.random.seed()
        sys.argv = [run_process.__file__, *arguments]
        code = run_process.serve(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # a normal exit takes longer, because it frees all modules
