"""Adafactor (Shazeer and Stern 2018): store second moments as row and column means to save optimizer memory.

Paper       Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (arXiv 1804.04235).
Promise     Almost no optimizer state: rows + columns elements per matrix, and no first moment. Equal to
            torch.optim.Adafactor.
Use         optimizer = thrifty.optim.Adafactor(model, lr=1e-2)
Start with  `adafactor:lr=1e-2`. The learning rate is relative to the root mean square of each parameter.
Cost        Two reductions over each matrix per step.
Avoid       Models whose AdamW state fits in memory, because updates without a first moment are noisier.
Does not    Keep a first moment, or factor the second moments of vectors and biases.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from thrifty.core.claims import Claim
from thrifty.core.dtensors import is_dtensor, with_partial_sums_added
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.setting_bounds import LEAST_EPSILON, Rate, SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.chunked_update import chunks_like, row_chunks
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleBySchedule, layer_norms


def factored_update(update: Tensor, row: Tensor, column: Tensor, fresh: float | Tensor, least: float) -> None:
    """Divide an update in place by the root of its estimated mean squares. The update is (…, r, c).

    The estimate is row · column / mean(row). `row` (…, r) has mean squares over columns, and `column` (…, c) has mean
    squares over rows. Both are first updated; `fresh` is the weight of the newest squares.
    """
    parts = row_chunks(update) if update.ndim == 2 else (update,)
    total: Tensor | None = None
    for part, mean in zip(parts, chunks_like(parts, row), strict=True):
        squares = part.square()
        mean.lerp_(on_every_rank(squares.sum(-1)) / update.shape[-1], fresh)
        total = squares.sum(-2) if total is None else total + squares.sum(-2)
    assert total is not None
    column.lerp_(on_every_rank(total) / update.shape[-2], fresh)
    relative = row / (on_every_rank(row.sum(-1, keepdim=True)) / row.shape[-1]).clamp(min=least)
    for part, row_factor in zip(parts, chunks_like(parts, relative), strict=True):
        second = row_factor.unsqueeze(-1) * column.unsqueeze(-2)
        part.mul_(second.clamp_(min=least * least).rsqrt_())


def on_every_rank(total: Tensor) -> Tensor:
    """Return the sum over ranks of a partial DTensor. Return any other tensor unchanged."""
    if not is_dtensor(total):
        return total
    return with_partial_sums_added(total)


class ScaleByFactoredSquare(GradientTransform):
    """Divide updates by the root of their mean squares, and clip each update to a root mean square of `clip_threshold`.

    Mean squares of matrices are estimated from rows and columns. At update t, the newest square has the weight t^decay.
    Roots are at least `eps1`, by default the machine epsilon of the gradient's dtype.
    """

    name = "scale_by_factored_square"
    reach = TransformScope.TENSOR
    squares = frozenset({"row", "column", "square"})

    def __init__(self, decay: float = -0.8, clip_threshold: float = 1.0, eps1: float | None = None):
        self.decay, self.clip_threshold, self.eps1 = decay, clip_threshold, eps1

    def scalars(self, step: int, age: int) -> dict[str, float]:
        return {"fresh": (age + 1) ** self.decay}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        slots: Slots = {"row": [], "column": [], "square": []}
        for parameter in parameters:
            zeros, none = torch.zeros_like(parameter), parameter.new_empty(0)
            factored = parameter.ndim > 1
            slots["row"].append(on_every_rank(zeros.sum(-1)) if factored else none)
            slots["column"].append(on_every_rank(zeros.sum(-2)) if factored else none)
            slots["square"].append(none if factored else zeros)
        return slots

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        fresh = numbers["fresh"]
        for update, row, column, square in zip(updates, slots["row"], slots["column"], slots["square"], strict=True):
            least = torch.finfo(update.dtype).eps if self.eps1 is None else self.eps1
            if update.ndim > 1:
                factored_update(update, row, column, fresh, least)
            else:
                square.lerp_(update.square(), fresh)
                update.mul_(square.clamp(min=least * least).rsqrt_())
        for update, length in zip(updates, layer_norms(updates, [None] * len(updates)), strict=True):
            update.div_((length / (update.numel() ** 0.5 * self.clip_threshold)).clamp(min=1.0))
        return updates


class ScaleByParameterSize(GradientTransform):
    """Multiply updates by the root mean square of the parameter, or by `least` if that is larger."""

    name = "scale_by_parameter_size"
    reach = TransformScope.TENSOR

    def __init__(self, least: float = 1e-3):
        self.least = least

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        for update, length in zip(updates, layer_norms(parameters, [None] * len(parameters)), strict=True):
            update.mul_((length / update.numel() ** 0.5).clamp(min=self.least))
        return updates


def relative_step(step: int, largest: float) -> float:
    """Return min(largest, 1 / sqrt(t)) for the t-th update; `step` counts from 0."""
    return min(largest, (step + 1) ** -0.5)


def adafactor(
    lr: float = 1e-2,
    decay: float = -0.8,
    clip_threshold: float = 1.0,
    eps1: float | None = None,
    eps2: float = 1e-3,
    weight_decay: float = 0.0,
) -> GradientTransform:
    """Return Adafactor as a chain of transforms.

    parameter -= relative step · max(eps2, RMS(parameter)) · u + lr · weight_decay · parameter. u is the gradient
    divided by the root of its factored mean square, clipped to an RMS of `clip_threshold`.
    """
    return chain(
        ScaleByFactoredSquare(decay, clip_threshold, eps1),
        ScaleByParameterSize(eps2),
        ScaleBySchedule(lambda step: -relative_step(step, lr), name="scale_by_relative_step"),
        AddDecayedWeights(-lr * weight_decay),
    )


class Adafactor(Technique):
    """As in torch, an update is multiplied by the relative step min(lr, 1 / sqrt(step)) and by the root mean square of
    the parameter. Weight decay is lr · weight_decay. Differs from the paper: ε₁ is a lower bound of the divisor and is
    not added to squares. Convolution kernels are factored over their last two dims."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1e-2
    """Maximum of the relative step, which is the size of an update relative to the parameter."""
    decay: Annotated[float, SettingBound(most=0)] = -0.8
    """Exponent in step^decay, the weight of the newest squared gradient."""
    clip_threshold: Annotated[float, SettingBound(above=0)] = 1.0
    """Maximum root mean square of an update, before multiplication by the relative step."""
    eps1: Annotated[float | None, LEAST_EPSILON] = None
    """The paper's ε₁, lower bound of the root of a second moment; by default the machine epsilon of the gradients."""
    eps2: Rate = 1e-3
    """The paper's ε₂, lower bound of the root mean square of a parameter."""
    weight_decay: Rate = 0.0

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(
            adafactor(self.lr, self.decay, self.clip_threshold, self.eps1, self.eps2, self.weight_decay), transform
        )
