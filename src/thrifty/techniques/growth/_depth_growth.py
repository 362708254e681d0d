"""Models that start with fewer blocks than they end with: cutting stacks short, and what taller ones start from."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from thrifty.core.state import TrainState
from thrifty.modeling.module_surgery import find_stacks

Order = Literal["ABCABC", "AABBCC"]


def stacked_origin(block: int, old_depth: int, order: Order = "ABCABC") -> int:
    """Which old block a block of the taller model starts from: the old stack repeated whole, or each block twice."""
    return block % old_depth if order == "ABCABC" else min(block // 2, old_depth - 1)


def is_copied_block(block: int, old_depth: int, order: Order = "ABCABC") -> bool:
    """Whether a block of the taller model is one more copy: not the first that starts from its origin."""
    if order == "ABCABC":
        return block >= old_depth
    return block > 0 and stacked_origin(block, old_depth, order) == stacked_origin(block - 1, old_depth, order)


def cut_stacks(model: nn.Module, depth: Callable[[int], int]) -> None:
    """Leave the first `depth(blocks)` blocks of each stack, at least one."""
    for blocks in find_stacks(model).values():
        del blocks[max(depth(len(blocks)), 1) :]


@dataclass(frozen=True)
class BlockParameter:
    """Where a parameter is that belongs to a block."""

    stack: str
    block: int
    path: str
    """Its name inside the block."""
    old_depth: int
    """How many blocks that stack has before it grows."""


class DepthMapping:
    """For names of a taller model's parameters, what they are in the model that a state has now."""

    def __init__(self, state: TrainState, order: Order = "ABCABC"):
        self.state, self.order = state, order

    def origin(self, parameter: str) -> str:
        place = self.place(parameter)
        if place is None:
            return parameter
        return f"{place.stack}.{stacked_origin(place.block, place.old_depth, self.order)}.{place.path}"

    def adds(self, parameter: str) -> bool:
        place = self.place(parameter)
        return place is not None and is_copied_block(place.block, place.old_depth, self.order)

    def place(self, parameter: str) -> BlockParameter | None:
        for stack, depth in self._depths.items():
            if match := re.fullmatch(rf"{re.escape(stack)}\.(\d+)\.(.*)", parameter):
                return BlockParameter(stack, int(match[1]), match[2], depth)
        return None

    @cached_property
    def _depths(self) -> dict[str, int]:
        model = self.state.model
        assert model is not None
        # with blocks of other pipeline stages
        return {name: len([*model.get_submodule(name).children()]) for name in find_stacks(model)}
