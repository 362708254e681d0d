"""A decaying average of the weights that something other than evaluation asks for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope
from thrifty.core.shard_layout import local_tensors


class TrailingAverage(GradientTransform):
    """The mean behind the weights; updates pass through as they are. Each step keeps min(momentum, (1 + t) / (10 + t))
    of it, t counting the weights that are in it; the first are copied."""

    reach = TransformScope.ROWS

    def __init__(self, momentum: float, name: str):
        self.momentum, self.name = momentum, name

    def scalars(self, step: int, age: int) -> dict[str, float]:
        kept = min(self.momentum, (1 + age) / (10 + age)) if age else 0.0
        return {"fresh": 1 - kept}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        # in float32 at least: what a step adds is less than 16 bits can hold
        wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        return {"mean": [p.detach().to(dtype, copy=True) for p, dtype in zip(parameters, wide, strict=True)]}

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        mean = slots["mean"]
        now = [parameter.to(tensor.dtype) for parameter, tensor in zip(parameters, mean, strict=True)]
        torch._foreach_lerp_(local_tensors(mean), local_tensors(now), float(numbers["fresh"]))
