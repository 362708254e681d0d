"""What a run takes on disk: its checkpoints, the optimizer state that lies in a file, the data as prepared."""

from collections.abc import Iterable

from thrifty.core.footprint import Footprint
from thrifty.core.recipe import CheckpointSettings
from thrifty.core.technique import Technique

BEST, NEXT = 1, 1
"""Checkpoints beside the newest ones: the best stays, and the next is whole before the oldest goes."""
ADAM = 2.0
"""Moments for each parameter, where the footprint says nothing of a state that was moved out of memory."""


def disk_bytes(
    checkpoints: CheckpointSettings, footprint: Footprint, techniques: Iterable[Technique], data: float
) -> dict[str, float]:
    """Bytes by what takes them, at most at any time. A checkpoint holds parameters, buffers and optimizer state."""
    is_outside = any(technique.offloads_optimizer_state for technique in techniques)
    state = max(footprint.optimizer, ADAM * footprint.gradients if is_outside else 0.0)
    each = footprint.parameters + footprint.buffers + state
    usage = {"checkpoints": (checkpoints.keep + BEST + NEXT + len(checkpoints.extra_steps)) * each}
    if is_outside:
        usage["optimizer state"] = state
    if data:
        usage["prepared data"] = data
    return usage
