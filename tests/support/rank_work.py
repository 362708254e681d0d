"""Work of the ranks in a test, each in its own process."""

import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_worlds import FailingDisk, assert_same, names
from rank_processes import PROCESSES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from thrifty.core.errors import ThriftyError
from thrifty.training.checkpoint import fill, find, save
from thrifty.training.rank_sync import ProcessGroupSync

SECONDS = 30
"""Within which all ranks must have ended, whatever happens to one."""


def on_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `work(*args)` on each rank of a gloo group; None for a rank that died. Raises if a rank
    raised.
    """
    receivers, processes = [], []
    rendezvous = args[0].parent / f"rendezvous {time.monotonic_ns()}"
    for rank in range(size):
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=run_rank, args=(rank, size, rendezvous, sender, work, args))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    deadline = time.monotonic() + 60 + SECONDS
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    waiting = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not waiting, f"ranks {waiting} hang"
    results = [received(receiver) for receiver in receivers]
    for rank, result in enumerate(results):
        assert not (isinstance(result, str) and result.startswith("Traceback")), f"rank {rank}: {result}"
    return results


def received(receiver: Any) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        return None


def run_rank(rank: int, size: int, rendezvous: Path, sender: Any, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        sender.send(work(*args))
    except Exception:
        sender.send(traceback.format_exc())
    os._exit(0)  # a group whose peer died cannot be taken down in order


SHAPES = {"even": (8, 3), "uneven": (7, 5), "fewer rows than ranks": (1, 4), "square": (6, 6), "no rows": (0, 4)}


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["half"] = torch.randn(9, 2, generator=generator).bfloat16()
    tensors["mask"] = torch.randn(4, 4, generator=generator) > 0
    return tensors


def sharded(tensors: dict[str, torch.Tensor], dim: int = 0) -> dict[str, torch.Tensor]:
    """Return each tensor as a DTensor over all ranks, and as plain and replicated tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {name: distribute_tensor(tensor, mesh, [Shard(dim)]) for name, tensor in tensors.items()}
    placed["replicated"] = distribute_tensor(tensors["square"], mesh, [Replicate()])
    return placed | {"plain": tensors["square"] + 1, "scalar": torch.tensor(2.5), "tied": placed["square"]}


def on_two_axes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sharded over the second axis of a mesh, and not even mentioned on the first."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "model"))
    return {name: distribute_tensor(tensor, mesh["model"], [Shard(0)]) for name, tensor in tensors.items()}


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    expected = dict(tensors)
    expected["replicated"], expected["plain"] = tensors["square"], tensors["square"] + 1
    return expected | {"scalar": torch.tensor(2.5), "tied": tensors["square"]}


def save_sharded(folder: Path, dim: int) -> list[str]:
    saved = save(folder, 5, sharded(whole_tensors(), dim), {"rank": dist.get_rank()}, ranks=ProcessGroupSync())
    return names(saved.path)


def load_sharded(folder: Path, dim: int) -> str:
    into = sharded({name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}, dim)
    into["tied"] = into["square"]
    found = find(folder, ranks=ProcessGroupSync())
    fill(found, into, ranks=ProcessGroupSync())
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in into.items()}
    assert_same(full, whole(whole_tensors()))
    return f"{found.step} {found.scalars} {found.notices}"


def save_on_two_axes(folder: Path) -> None:
    save(folder, 5, on_two_axes(whole_tensors()), {}, ranks=ProcessGroupSync())


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except ThriftyError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_everywhere(folder: Path, failing: int) -> list[str]:
    """A save in which one rank's disk fails, for every change of the disk that this rank makes."""
    ranks, tensors = ProcessGroupSync(), sharded(whole_tensors())
    complete = FailingDisk()
    save(folder, 9, tensors, {}, files=complete, ranks=ranks)
    changes, messages = ranks.gather_or_raise(lambda: len(complete.done))[failing], []
    for at in range(changes):
        for how in ("full", "broken"):
            disk = FailingDisk(at, how) if ranks.rank == failing else FailingDisk()
            messages.append(message_of(partial(save, folder, 10 + at, tensors, {}, files=disk, ranks=ranks)))
            assert find(folder, ranks=ranks).notices == []
    return messages


def one_rank_holds_something_odd(folder: Path) -> str:
    tensors = {"odd": torch.ones(2, dtype=torch.complex128 if dist.get_rank() == 1 else torch.float32)}
    return message_of(lambda: save(folder, 5, tensors, {}, ranks=ProcessGroupSync()))


class FatalDisk(FailingDisk):
    def create_file(self, path: Path) -> int:
        os._exit(9)


def die_in_a_save(folder: Path) -> tuple[str, float]:
    began = time.monotonic()
    disk = FatalDisk() if dist.get_rank() == 1 else FailingDisk()
    message = message_of(lambda: save(folder, 9, sharded(whole_tensors()), {}, files=disk, ranks=ProcessGroupSync()))
    return message, time.monotonic() - began


def no_one_load(folder: Path) -> str:
    return message_of(lambda: find(folder, ranks=ProcessGroupSync()))


def save_a_shard_alone(folder: Path) -> str:
    return message_of(lambda: save(folder, 5, sharded(whole_tensors()), {}))
