"""Progressive stacking: train a shallow model, copy its blocks on top of themselves, go on.

Paper     Gong et al. 2019, Efficient Training of BERT by Progressively Stacking (ICML); schedule of two doublings at
          12.5 % and 30 % of the run after Kaddour et al. 2023, No Train No Gain (arXiv 2307.06440).
Promise   cheaper early steps. Block l of the old model starts blocks l and l + n of the new one ("ABCABC").
Avoid     for long runs: against a baseline whose rate is decayed to the budget the gain shrinks (0.256 nats at 800
          steps, 0.038 at 4000 in a run of 8 blocks of width 64) and No Train No Gain finds none at scale.
Note      the optimizer starts afresh after each growth, the learning rate goes on (the paper's way).
"""

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

from thrifty.core.change import Change
from thrifty.core.errors import IntegrityError
from thrifty.core.moments import Moment
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.surgery import find_stacks
from thrifty.core.technique import Numerics, Technique


def stacked_origin(block: int, old_depth: int) -> int:
    """Which old block a block of the taller model starts from, when the old stack is repeated whole."""
    return block % old_depth


@dataclass(frozen=True)
class Stacking(Technique):
    stage, numerics = Stage.GROW, Numerics.DIFFERENT
    claims = frozenset({"depth"})

    at: tuple[Moment, ...] = (0.125, 0.3)
    """When the depth doubles, of each stack where a model has several."""
    moments: Literal["reset", "copy"] = "reset"
    """Whether the optimizer starts afresh after a growth or copies the state of the block it grew from."""

    def changes(self, step: int, state: TrainState) -> Change | None:
        decided = state.decided(self.name, step)
        if decided is None and step != 0 and step not in self.at:
            return None
        divisor = decided["depth_divisor"] if decided else 2 ** sum(1 for moment in self.at if moment > step)

        def cut(model: nn.Module) -> nn.Module:
            for blocks in find_stacks(model).values():
                del blocks[max(len(blocks) // divisor, 1) :]
            return model

        def origin(parameter: str) -> str | None:
            assert state.model is not None
            for name in find_stacks(state.model):
                if found := re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.*)", parameter):
                    depth = len([*state.model.get_submodule(name).children()])  # with blocks of other pipeline stages
                    return f"{name}.{stacked_origin(int(found[1]), depth)}.{found[2]}"
            return parameter

        reason = "start shallow" if step == 0 else "copy the blocks on top of themselves"
        return Change(reason, {"depth_divisor": divisor}, cut, origin, self.moments)

    def holds(self, state: TrainState) -> None:
        divisors = [entry.decision["depth_divisor"] for entry in state.log if entry.technique == self.name]
        if not divisors:
            raise IntegrityError(f"{self.name}: the run's log does not say at which depth it is")
