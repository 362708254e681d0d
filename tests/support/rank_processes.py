"""Work done by several real processes in one gloo group."""

import faulthandler
import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")
"""Real processes that start in milliseconds: each is a fork of a server in which all is imported but nothing used."""
PROCESSES.set_forkserver_preload(
    [
        "thrifty.cli.main",
        "thrifty.training.trainer",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "transformers.modeling_utils",
    ]
)
SECONDS = 300


@contextmanager
def in_a_group_of_one() -> Iterator[None]:
    """A process group of this process alone, as torchrun with one process makes it."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(str(Path(folder, "store")), 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def on_ranks(size: int, work: Callable[..., Any], *args: Any, strangers: bool = False) -> list[Any]:
    """Return the result of `work(*args)` on each rank. Raises AssertionError with the traceback if a rank raised or
    hung.

    `strangers` are not forked from a common server: as under torchrun, each has its own hash order.
    """
    context: Any = multiprocessing.get_context("spawn") if strangers else PROCESSES
    meeting = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False)
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(rank, size, meeting.port, sender, work, args), daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        assert all(receiver.poll(SECONDS) for receiver in receivers), "the ranks hang"
        results = [_answer(rank, receiver) for rank, receiver in enumerate(receivers)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for rank, (worked, result) in enumerate(results):
        assert worked, f"rank {rank}: {result}"
    return [result for _, result in results]


def _answer(rank: int, receiver: Any) -> tuple[bool, Any]:
    try:
        return receiver.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word; where it was then stands in its stderr") from None


def _run_rank(rank: int, size: int, port: int, sender: Any, work: Callable[..., Any], args: Any) -> None:
    faulthandler.enable(all_threads=True)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of threads that never ran any Python, too
    gc.freeze()  # no collection here need look at all that the server has imported
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        sender.send((True, work(*args)))
    except Exception:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        dist.destroy_process_group()
