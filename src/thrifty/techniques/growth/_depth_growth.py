"""Growth in depth: remove blocks at the start of a run, and later add copies of blocks."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.core.state import TrainState
from thrifty.modeling.module_surgery import are_copies, find_stacks

Order = Literal["ABCABC", "AABBCC"]


def stacked_origin(block: int, old_depth: int, order: Order = "ABCABC") -> int:
    """Return the index of the old block that initializes block `block` of the deeper model.

    The order ABCABC repeats the whole stack. The order AABBCC repeats each block.
    """
    return block % old_depth if order == "ABCABC" else min(block // 2, old_depth - 1)


def is_copied_block(block: int, old_depth: int, order: Order = "ABCABC") -> bool:
    """Return True if block `block` of the deeper model is an added copy, not the first copy of its old block."""
    if order == "ABCABC":
        return block >= old_depth
    return block > 0 and stacked_origin(block, old_depth, order) == stacked_origin(block - 1, old_depth, order)


def cut_stacks(model: nn.Module, depth: Callable[[int], int]) -> None:
    """Shorten each stack to its first `depth(number of blocks)` blocks, at least one. Raise RefusedError for blocks
    that cannot be copies of each other, or if every stack has only one block."""
    stacks = find_stacks(model)
    if all(len(blocks) == 1 and depth(1) < 1 for blocks in stacks.values()):
        raise RefusedError(
            f"no stack has several blocks ({', '.join(stacks)}), so the model cannot start shallower",
            fix="use a model with several blocks, such as --set model.preset=llama-nano",
        )
    for stack, blocks in stacks.items():
        if not are_copies(blocks):
            raise RefusedError(
                f"the blocks of {stack or 'the model'} have different parameters, so none can be a copy of another",
                fix="--with growth.layer_drop in its place; or use a model of equal blocks",
            )
        del blocks[max(depth(len(blocks)), 1) :]


@dataclass(frozen=True)
class BlockParameter:
    """Position of a block's parameter in the model."""

    stack: str
    block: int
    path: str
    """Name of the parameter inside the block."""
    old_depth: int
    """Number of blocks of the stack before growth."""


class DepthMapping:
    """A mapping from parameter names of a deeper model to parameter names of the current model."""

    def __init__(self, state: TrainState, order: Order = "ABCABC"):
        self.state, self.order = state, order

    def origin(self, parameter: str) -> str:
        position = self.locate(parameter)
        if position is None:
            return parameter
        block = stacked_origin(position.block, position.old_depth, self.order)
        return f"{_prefix(position.stack)}{block}.{position.path}"

    def adds(self, parameter: str) -> bool:
        position = self.locate(parameter)
        return position is not None and is_copied_block(position.block, position.old_depth, self.order)

    def locate(self, parameter: str) -> BlockParameter | None:
        for stack, depth in self._depths.items():
            if match := re.fullmatch(rf"{re.escape(_prefix(stack))}(\d+)\.(.*)", parameter):
                return BlockParameter(stack, int(match[1]), match[2], depth)
        return None

    @cached_property
    def _depths(self) -> dict[str, int]:
        model = self.state.model
        assert model is not None
        # also counts blocks of other pipeline stages
        return {name: len([*model.get_submodule(name).children()]) for name in find_stacks(model)}


def _prefix(stack: str) -> str:
    """Return the beginning of the names of a stack's blocks; the stack "" is the model itself."""
    return f"{stack}." if stack else ""
