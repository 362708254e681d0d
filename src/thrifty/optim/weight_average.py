"""Exponential moving average (EMA) of the weights, for evaluation and for techniques that use it."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope
from thrifty.core.shard_layout import local_tensors

Beginning = Literal["warmup", "debiased"]


def decay_after(averaged: int, decay: float, ramp: Beginning) -> float:
    """Return the decay of the next step, if the EMA already contains the parameters of `averaged` steps. The first
    decay is 0.

    With "warmup", the decay is min(decay, (1 + n) / (10 + n)) after n steps. With "debiased", the parameters of t steps
    ago have the coefficient decay^t, divided by the sum of all coefficients. This equals an EMA of n steps that starts
    at zero, divided by 1 - decay^n.
    """
    if averaged == 0:
        return 0.0
    if ramp == "warmup":
        return min(decay, (1 + averaged) / (10 + averaged))
    return decay * (1 - decay**averaged) / (1 - decay ** (averaged + 1))


class EmaTransform(GradientTransform):
    """Element that averages the parameters (EMA). Updates are not changed."""

    reach = TransformScope.ROWS

    def __init__(
        self,
        decay: float,
        ramp: Beginning = "warmup",
        start: int = 0,
        evaluate: bool = True,
        name: str = "exponential_average",
    ):
        self.decay, self.ramp, self.start, self.evaluate, self.name = decay, ramp, start, evaluate, name

    def scalars(self, step: int, age: int) -> dict[str, float]:
        averaged = max(min(age, step - self.start), 0)
        weight = 1 - decay_after(averaged, self.decay, self.ramp) if step >= self.start else 0.0
        return {"averaged": averaged, "weight": weight}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"mean": [high_precision_copy(parameter) for parameter in parameters]}

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        if numbers["weight"]:
            mean = slots["mean"]
            wide = [parameter.to(tensor.dtype) for parameter, tensor in zip(parameters, mean, strict=True)]
            torch._foreach_lerp_(local_tensors(mean), local_tensors(wide), float(numbers["weight"]))

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        return slots["mean"] if self.evaluate and numbers["averaged"] else None


def high_precision_copy(parameter: Tensor) -> Tensor:
    """Return a copy of the same shape in float32, or in the parameter's dtype if that is wider."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
