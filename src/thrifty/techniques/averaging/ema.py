"""Exponential average: EMA, a decaying mean of the weights is judged, the weights train on.

Paper     Polyak & Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; the exponential form and its
          habits in Morales-Brotons et al. 2024, Exponential Moving Average of Weights (arXiv 2411.18704).
Promise   the noise of the last few 1 / (1 - decay) steps averaged away. Evaluated and exported is the mean; the weights
          in training are those of the plain run, measured beside it ("trained_loss") and exported by
          `thrifty export --raw-weights`.
Cost      one copy of the parameters in float32, and a pass over them at each step.
Avoid     with a rate that is decayed to zero: little noise is left to average.
Note      nothing of the weights before `start` is in it: the first weights are copied, and then either the decay warms
          up as (1 + t) / (10 + t), or the mean is that of Adam's bias correction. Buffers are not averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique

Beginning = Literal["warmup", "debiased"]


def decay_after(averaged: int, decay: float, beginning: Beginning) -> float:
    """How much of the mean is kept when the next weights come, `averaged` of them being in it already; 0 at first.

    "warmup" is min(decay, (1 + t) / (10 + t)). "debiased" weighs the weights of t steps ago by decay^t, divided by the
    sum of these weights: what a mean that starts at zero gives once it is divided by 1 - decay^n, without that detour.
    """
    if averaged == 0:
        return 0.0
    if beginning == "warmup":
        return min(decay, (1 + averaged) / (10 + averaged))
    return decay * (1 - decay**averaged) / (1 - decay ** (averaged + 1))


class EmaTransform(GradientTransform):
    """A decaying mean of the parameters; updates pass through as they are."""

    name = "exponential_average"
    reach = TransformScope.ROWS

    def __init__(self, decay: float, beginning: Beginning = "warmup", start: int = 0, judge: bool = True):
        self.decay, self.beginning, self.start, self.judge = decay, beginning, start, judge

    def scalars(self, step: int, age: int) -> dict[str, float]:
        averaged = max(min(age, step - self.start), 0)
        weight = 1 - decay_after(averaged, self.decay, self.beginning) if step >= self.start else 0.0
        return {"averaged": averaged, "weight": weight}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"mean": [high_precision_copy(parameter) for parameter in parameters]}

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        if numbers["weight"]:
            mean = slots["mean"]
            wide = [parameter.to(tensor.dtype) for parameter, tensor in zip(parameters, mean, strict=True)]
            torch._foreach_lerp_(local_tensors(mean), local_tensors(wide), float(numbers["weight"]))

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        return slots["mean"] if self.judge and numbers["averaged"] else None


def high_precision_copy(parameter: Tensor) -> Tensor:
    """A copy in float32, or in the parameter's own format where that is wider."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


@dataclass(frozen=True)
class ExponentialMovingAverage(Technique):
    stage, numerics = Stage.AVERAGE, Numerics.DIFFERENT
    claims = frozenset({Claim.AVERAGED_WEIGHTS})

    decay: Annotated[float, SettingBound(least=0, most=0.999999)] = 0.999
    """How much of the mean each step keeps, in the long run."""
    ramp: Beginning = "warmup"
    start: StepOrFraction = 0
    """The first step whose weights are averaged."""
    evaluate: bool = True
    """Whether the mean is what is evaluated and exported; otherwise it is only kept in the checkpoints."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(EmaTransform(self.decay, self.ramp, int(self.start), self.evaluate), transform)
