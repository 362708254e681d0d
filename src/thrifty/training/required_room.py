"""Disk and memory that a run requires, compared with what is free before the first step."""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from thrifty.composition.compose import Run
from thrifty.core.atomic_files import refuse_full_disk
from thrifty.core.errors import spelled
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import axis
from thrifty.core.out_of_memory import OutOfMemory
from thrifty.core.ranks import ranks
from thrifty.core.recipe import CheckpointSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.machine.machine_info import free_memory
from thrifty.training.rank_sync import process_group_sync

BEST, NEXT = 1, 1
"""Number of checkpoints in addition to the newest: the best, and the next (written before the oldest is deleted)."""
ADAM = 2.0
"""Number of moments per parameter in an offloaded optimizer state. The footprint does not count this state."""


def disk_bytes(
    checkpoints: CheckpointSettings,
    footprint: Footprint,
    techniques: Iterable[Technique],
    data: float,
    steps: float = math.inf,
) -> dict[str, float]:
    """Return the maximum bytes on disk by kind of data. A checkpoint holds parameters, buffers and optimizer state.

    A run of few `steps` may save fewer checkpoints than it may keep.
    """
    is_outside = any(technique.offloads_optimizer_state for technique in techniques)
    state = max(footprint.optimizer, ADAM * footprint.gradients if is_outside else 0.0)
    each = footprint.parameters + footprint.buffers + state
    saved = steps // checkpoints.every + 1 + len(checkpoints.extra_steps)
    usage = {"checkpoints": min(checkpoints.keep + BEST + NEXT + len(checkpoints.extra_steps), saved) * each}
    if is_outside:
        usage["optimizer state"] = state
    if data:
        usage["prepared data"] = data
    return usage


def refuse_little_disk(recipe: Recipe, run: Run, footprint: Footprint, folder: Path) -> None:
    """Raise InfeasibleError if the checkpoints of a run do not fit the disk, apart from those it has already."""
    divided = ranks() / axis("replicate").size
    usage = disk_bytes(recipe.checkpoints, footprint, run.techniques, 0.0, run.steps)
    present = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    again = f"thrifty resume {folder}" if present else "start again"
    refuse_full_disk(
        folder,
        sum(usage.values()) * divided - present,
        f"the run {recipe.name!r} writes checkpoints",
        fix=spelled("--set checkpoints.keep=1", 'settings={"checkpoints.keep": 1}')
        + f" keeps fewer; or free space on that disk and {again}; or move the run folder to a larger disk",
    )


def refuse_little_memory(run: Run, predicted: float, remedy: Callable[[float], str]) -> None:
    """Raise OutOfMemory if the predicted peak of the tensors exceeds the free memory of a rank's device.

    `remedy` returns the fix for the free bytes.
    """
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if run.device.type == "cpu" else 1
    free = min(process_group_sync().gather_or_raise(lambda: free_memory(run.device))) / sharing
    if predicted > free:
        raise OutOfMemory(
            f"the run needs {predicted / 1e6:,.0f} MB of memory, and {free / 1e6:,.0f} MB are free", fix=remedy(free)
        )
