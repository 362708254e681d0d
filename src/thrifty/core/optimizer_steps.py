"""Finished steps of any torch optimizer, kept where its state dict keeps them."""

from typing import Any

from torch.optim import Optimizer

from thrifty.core.errors import UsageError

KEY = "finished_steps"
"""Key of the first parameter group."""


def count_steps(optimizer: Optimizer) -> None:
    """Count the steps of an optimizer from now on; one that counts already keeps its count."""

    def count(optimizer: Optimizer, *_: Any) -> None:
        optimizer.param_groups[0][KEY] = finished_steps(optimizer) + 1

    if KEY not in optimizer.param_groups[0]:
        optimizer.param_groups[0][KEY] = 0
        optimizer.register_step_post_hook(count)


def finished_steps(optimizer: Optimizer) -> int:
    """Return the number of steps since `count_steps`, those before a state dict was saved and loaded included.

    Raises UsageError for an optimizer that has loaded the state of one that does not count.
    """
    if KEY not in optimizer.param_groups[0]:
        raise UsageError(
            f"the state that the optimizer has loaded has no {KEY!r} in its first group, which techniques go by",
            fix="save the optimizer's state with the same techniques applied",
        )
    return int(optimizer.param_groups[0][KEY])
