"""Disk usage of a run: checkpoints, offloaded optimizer state, and prepared data."""

from collections.abc import Iterable

from thrifty.core.footprint import Footprint
from thrifty.core.recipe import CheckpointSettings
from thrifty.core.technique import Technique

BEST, NEXT = 1, 1
"""Number of checkpoints in addition to the newest: the best, and the next (written before the oldest is deleted)."""
ADAM = 2.0
"""Number of moments per parameter in an offloaded optimizer state. The footprint does not count this state."""


def disk_bytes(
    checkpoints: CheckpointSettings, footprint: Footprint, techniques: Iterable[Technique], data: float
) -> dict[str, float]:
    """Return the maximum bytes on disk by kind of data. A checkpoint holds parameters, buffers and optimizer state."""
    is_outside = any(technique.offloads_optimizer_state for technique in techniques)
    state = max(footprint.optimizer, ADAM * footprint.gradients if is_outside else 0.0)
    each = footprint.parameters + footprint.buffers + state
    usage = {"checkpoints": (checkpoints.keep + BEST + NEXT + len(checkpoints.extra_steps)) * each}
    if is_outside:
        usage["optimizer state"] = state
    if data:
        usage["prepared data"] = data
    return usage
