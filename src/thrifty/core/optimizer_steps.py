"""Step counter for any torch optimizer, stored in its state dict."""

from typing import Any

from torch.optim import Optimizer

from thrifty.core.errors import UsageError

KEY = "finished_steps"
"""Key of the counter in the first parameter group."""


def count_steps(optimizer: Optimizer) -> None:
    """Count the steps of an optimizer from now on. An existing count continues."""

    def count(optimizer: Optimizer, *_: Any) -> None:
        optimizer.param_groups[0][KEY] = finished_steps(optimizer) + 1

    if KEY not in optimizer.param_groups[0]:
        optimizer.param_groups[0][KEY] = 0
        optimizer.register_step_post_hook(count)


def finished_steps(optimizer: Optimizer) -> int:
    """Return the number of steps since `count_steps`, including steps before a saved state dict was loaded. Raise
    UsageError if the loaded state dict has no counter."""
    if KEY not in optimizer.param_groups[0]:
        raise UsageError(
            f"the optimizer's loaded state has no {KEY!r} in its first group, which techniques require",
            fix="save the optimizer's state with the same techniques applied",
        )
    return int(optimizer.param_groups[0][KEY])
