"""Processes, devices and mesh of a run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from thrifty.core import mesh
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError, refuse_unknown, spelled
from thrifty.core.out_of_memory import explain_out_of_memory
from thrifty.core.ranks import rank, ranks
from thrifty.core.recipe import Recipe
from thrifty.training import heartbeat
from thrifty.training.rendezvous import take_srun_ranks

_NO_LIMIT = timedelta(days=30)
"""Timeout of a collective. The heartbeat detects hanging ranks, and ranks may wait for hours while one rank prepares
text."""


@contextmanager
def process_group() -> Iterator[None]:
    """Open the process group inside the context if torchrun or srun started this process; do nothing for a single
    process. Raise OutOfMemory in place of an allocator's error."""
    take_srun_ranks()
    if "RANK" not in os.environ or dist.is_initialized():
        with explain_out_of_memory():
            yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with heartbeat.run_heartbeat(_leave_group) as meeting:
        dist.init_process_group(
            backend, timeout=_NO_LIMIT, store=meeting.connection(), rank=meeting.rank, world_size=meeting.ranks
        )
        with explain_out_of_memory():
            yield


@contextmanager
def ranks_of(recipe: Recipe) -> Iterator[None]:
    """Open the process group for a recipe's mesh. Raise UsageError if there are too few ranks."""
    with process_group():
        if ranks() < (least := recipe.mesh.least_ranks):
            alone = ",".join(f"{name}=1" for name, size in vars(recipe.mesh).items() if size > 1)
            raise UsageError(
                f"the mesh of {recipe.mesh.label} requires {least} ranks, and this start has {ranks()}",
                fix=spelled(
                    f"--ranks {least}; or torchrun --nproc-per-node {least} -m thrifty …; or use --mesh {alone}",
                    f"ranks={least}; or torchrun --nproc-per-node {least} script.py",
                ),
            )
        yield


def _leave_group() -> None:
    mesh.clear_mesh()
    if dist.is_initialized():
        dist.destroy_process_group()
    # gloo's threads need the interpreter to free the last tensors; after its shutdown they would abort the process
    time.sleep(0.1)


def choose_device(name: str) -> torch.device:
    """Return the device of this rank. "auto" selects a CUDA GPU if there is one. Each local rank has its own GPU."""
    if name.startswith(("gpu", "cuda:")):
        raise UsageError(f"unknown device {name!r}", fix="--device cuda")
    refuse_unknown("unknown device", name, ("auto", "cpu", "cuda", "mps"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch finds no GPU on this machine", fix="--device cpu")
    if name == "mps":
        if not torch.backends.mps.is_available():
            fix = "--set device=cpu; or --set device=auto"
            raise UsageError('device = "mps", but torch finds no GPU of an Apple chip', fix)
        if ranks() > 1:
            what = f"device = \"mps\" allows '1' rank, and this start has {ranks()}"
            raise UsageError(what, fix="start one process; or --set device=cpu")
        return torch.device("mps")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank() % torch.cuda.device_count())


def mesh_sizes(recipe: Recipe, count: int) -> dict[str, int]:
    """Return the number of ranks along each axis of the recipe's mesh. Raise UsageError if no technique uses an
    axis."""
    claims = {claim for technique in recipe.techniques for claim in technique.claims}
    sizes = recipe.mesh.sizes(count, sharded=Claim.PARAMETER_SHARDING in claims)
    for axis, (claim, technique) in mesh.USED_BY.items():
        if sizes[axis] > 1 and claim not in claims:
            raise UsageError(
                f"there are {count} ranks, but no technique of the recipe divides the work among the {sizes[axis]} "
                f"along the {axis} axis",
                fix=f"--with {technique}; or start fewer processes",
            )
    return sizes
