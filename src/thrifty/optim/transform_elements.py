"""Update elements that several optimizers share: momentum, Adam, decay, trust ratio, clipping, factors."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thrifty.core.dtensors import is_dtensor, replicated_like
from thrifty.core.gradient_transform import GradientTransform, Rule, Scalars, Slots, TransformScope
from thrifty.core.mesh import axis
from thrifty.core.shard_layout import FusedOrder, local_tensors, order_of
from thrifty.modeling.parameter_kinds import FusedSlices, fused_slices, is_matrix


class ScaleByMomentum(GradientTransform):
    """Momentum: a decaying sum of gradients, v = decay · v + g (Polyak 1964).

    With `nesterov` the update is g + decay · v, one step ahead (Sutskever et al. 2013). If the input is not a gradient,
    pass another `name`, because forked runs match slots by name.
    """

    reach = TransformScope.ROWS

    def __init__(self, decay: float = 0.9, nesterov: bool = False, name: str = "scale_by_momentum"):
        self.decay, self.nesterov, self.name = decay, nesterov, name

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"momentum": [torch.zeros_like(parameter) for parameter in parameters]}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        momentum = slots["momentum"]
        torch._foreach_mul_(momentum, self.decay)
        torch._foreach_add_(momentum, updates)
        if self.nesterov:
            torch._foreach_add_(updates, momentum, alpha=self.decay)
            return updates
        return [tensor.clone() for tensor in momentum]


class ScaleByAdam(GradientTransform):
    """Adam: bias-corrected first moment divided by the root of the second moment (Kingma & Ba 2015, algorithm 1). If
    beta1 is 0, the gradient replaces the first moment, which is not stored.
    """

    name = "scale_by_adam"
    reach = TransformScope.ROWS
    squares = frozenset({"square"})

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, correct: bool = True):
        self.beta1, self.beta2, self.eps, self.correct = beta1, beta2, eps, correct

    def scalars(self, step: int, age: int) -> dict[str, float]:
        mean, square = self.beta1 ** (age + 1), self.beta2 ** (age + 1)
        shrunk = 1 - mean if self.correct else 1.0
        root_factor = shrunk / (1 - square) ** 0.5 if self.correct else 1.0
        return {"count": age + 1, "root_factor": root_factor, "eps": self.eps * shrunk}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        slots = ("mean", "square") if self.beta1 else ("square",)
        return {slot: [torch.zeros_like(parameter) for parameter in parameters] for slot in slots}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        square = slots["square"]
        if self.beta1:
            torch._foreach_lerp_(slots["mean"], updates, 1 - self.beta1)
        torch._foreach_mul_(square, self.beta2)
        torch._foreach_addcmul_(square, updates, updates, 1 - self.beta2)
        # both bias corrections in one factor: mean / c1 / (root / c2 + eps) = mean / (root · c1 / c2 + eps · c1)
        root = torch._foreach_sqrt(square)
        torch._foreach_mul_(root, numbers["root_factor"])
        torch._foreach_add_(root, numbers["eps"])
        return list(torch._foreach_div(slots["mean"] if self.beta1 else updates, root))


class SelectiveTransform(GradientTransform):
    """Base class of elements that change only the parameters that match a rule. `chosen` contains the indices of these
    parameters."""

    def __init__(self, where: Rule):
        self.where = where
        self.chosen: list[int] = []

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.chosen = [i for i, pair in enumerate(zip(names, parameters, strict=True)) if self.where(*pair)]
        return {}

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        selected = copy(self)
        selected.chosen = [place for place, i in enumerate(indices) if i in self.chosen]
        return selected


class AddDecayedWeights(SelectiveTransform):
    """Weight decay: add decay · parameter to the updates of the parameters that match the rule.

    Placed after the moments, this is decoupled weight decay (Loshchilov & Hutter 2019). Placed before the moments, it
    is L2 regularization.
    """

    name = "add_decayed_weights"
    reach = TransformScope.ROWS

    def __init__(self, decay: float, where: Rule = is_matrix):
        super().__init__(where)
        self.decay = decay

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        if self.decay and self.chosen:
            own = [updates[i] for i in self.chosen]
            torch._foreach_add_(own, [parameters[i] for i in self.chosen], alpha=self.decay)
        return updates


class ScaleParameters(SelectiveTransform):
    """Separate learning rate: multiply the updates of the parameters that match the rule by a constant."""

    name = "scale_parameters"
    reach = TransformScope.ROWS

    def __init__(self, factor: float, where: Rule):
        super().__init__(where)
        self.factor = factor

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        if self.chosen:
            torch._foreach_mul_([updates[i] for i in self.chosen], self.factor)
        return updates


def trust_ratio(
    weight: Tensor,
    update: Tensor,
    coefficient: float = 1.0,
    decay: float = 0.0,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Return coefficient · φ(‖w‖) / (‖u‖ + decay · ‖w‖) from ‖w‖ (`weight`) and ‖u‖ (`update`), in the shape of these
    norms.

    φ clamps ‖w‖ to `bounds`. The ratio is 1 if a norm is 0.
    """
    ratio = coefficient * weight.clamp(*bounds) / (update + decay * weight)
    return torch.where((weight > 0) & (update > 0), ratio, 1.0)


class ScaleByTrustRatio(SelectiveTransform):
    """Trust ratio: scale each layer's update to `trust_ratio` · (update + decay · parameter). The norm of the update is
    then proportional to the norm of the layer's weights.

    With decay, the formula is from LARS (You et al. 2017). LAMB (You et al. 2020) adds its decay in an earlier element.
    With `slices`, layers that share one fused weight (`modeling/parameter_kinds.py`) are scaled separately.
    """

    name = "scale_by_trust_ratio"
    reach = TransformScope.TENSOR

    def __init__(
        self,
        coefficient: float = 1.0,
        decay: float = 0.0,
        bounds: tuple[float, float] = (0.0, math.inf),
        slices: bool = False,
        where: Rule = is_matrix,
    ):
        super().__init__(where)
        self.coefficient, self.decay, self.bounds, self.slices = coefficient, decay, bounds, slices
        self.cuts: list[FusedSlices | None] = []

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.cuts = fused_slices(names, parameters) if self.slices else [None] * len(names)
        return super().init(names, parameters)

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        some = super().subset(indices)
        some.cuts = [self.cuts[i] for i in indices]
        return some

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        if not self.chosen:
            return updates
        own, weights = [updates[i] for i in self.chosen], [parameters[i] for i in self.chosen]
        cuts = [self.cuts[i] for i in self.chosen]
        orders = [order_of(parameter) for parameter in weights]
        lengths = zip(layer_norms(weights, cuts, orders), layer_norms(own, cuts, orders), strict=True)
        if self.decay:
            torch._foreach_add_(local_tensors(own), local_tensors(weights), alpha=self.decay)
        for update, (weight_norm, update_norm) in zip(own, lengths, strict=True):
            update.mul_(trust_ratio(weight_norm, update_norm, self.coefficient, self.decay, self.bounds))
        return updates


class ScaleBySchedule(GradientTransform):
    """Learning-rate schedule: multiply the updates by a factor that depends only on the step."""

    reach = TransformScope.ROWS

    def __init__(self, factor: Callable[[int], float], name: str = "scale_by_schedule"):
        self.factor, self.name = factor, name

    def scalars(self, step: int, age: int) -> dict[str, float]:
        return {"factor": self.factor(step)}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        torch._foreach_mul_(updates, numbers["factor"])
        return updates

    def rate(self, numbers: Scalars) -> float:
        return abs(float(numbers["factor"]))


def scale_by_learning_rate(rate: float) -> ScaleBySchedule:
    """Return an element that multiplies updates by -rate. Adding the result to the parameters is a descent step."""
    return ScaleBySchedule(lambda step: -rate, name="scale_by_learning_rate")


class ClipByGlobalNorm(GradientTransform):
    """Gradient clipping: scale all gradients so that their joint 2-norm is at most `largest` (Pascanu et al. 2013)."""

    name = "clip_by_global_norm"

    def __init__(self, largest: float):
        self.largest = largest

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        factor = (self.largest / (global_norm(updates) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local_tensors(updates), factor)
        return updates


def add_multiple(tensors: list[Tensor], others: list[Tensor], factor: float | Tensor) -> None:
    """Compute tensors += factor · others in place. During compilation, `factor` is a tensor."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(tensors, torch._foreach_mul(others, factor))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the joint 2-norm of all tensors as a scalar in float32 or wider. Sharded tensors count as whole
    tensors.
    """
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    norms = [
        full_values(torch.linalg.vector_norm(torch.stack(torch._foreach_norm([tensors[i] for i in group], 2, dtype))))
        for group in divided_alike(tensors)
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=dtype)
    stages = axis("pipeline")
    if stages.size > 1:
        square = norm.square()
        dist.all_reduce(square, group=stages.group)
        norm = square.sqrt()
    return norm


def divided_alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return groups of tensors with equal sharding, as lists of indices."""
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        is_parted = is_dtensor(tensor)
        groups.setdefault((tensor.device_mesh, tensor.placements) if is_parted else None, []).append(index)
    return list(groups.values())


def layer_norms(
    tensors: Sequence[Tensor], cuts: Sequence[FusedSlices | None], orders: Sequence[FusedOrder | None] | None = None
) -> list[Tensor]:
    """Return the 2-norm of each tensor. For a tensor with slices (`cuts`), return the norm of the slice that contains
    each row, broadcastable to the tensor. Sharded tensors are counted as whole tensors. `orders` are the fused orders
    of the parameters.
    """
    orders = orders or [None] * len(tensors)
    norms = [
        tensor if cut is None else _slice_norms(tensor, cut, order)
        for tensor, cut, order in zip(tensors, cuts, orders, strict=True)
    ]
    uncut = [i for i, cut in enumerate(cuts) if cut is None]
    for group in divided_alike([tensors[i] for i in uncut]):
        own = [uncut[i] for i in group]
        for i, norm in zip(own, full_values(torch.stack(torch._foreach_norm([tensors[i] for i in own]))), strict=True):
            norms[i] = norm
    return norms


def _slice_norms(tensor: Tensor, cut: FusedSlices, order: FusedOrder | None) -> Tensor:
    lines = torch.linalg.vector_norm(tensor, dim=1 - cut.dim)
    along = None if order is None else replace(order, dim=0)
    norms = [part.norm().expand(len(part)) for part in full_values(lines, along).split(list(cut.sizes))]
    return match_layout(torch.cat(norms).unsqueeze(1 - cut.dim), tensor, order)


def full_values(tensor: Tensor, order: FusedOrder | None = None) -> Tensor:
    """Return the whole tensor in its global shape. Shards are gathered or summed over ranks, and `order` is undone."""
    full = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return full if order is None else order.whole(full)


def match_layout(tensor: Tensor, sharded: Tensor, order: FusedOrder | None = None) -> Tensor:
    """Return a tensor with the row order and placements of `sharded`. The input is the same on every rank, and has the
    shape of `sharded` or broadcasts to it.
    """
    if order is not None:
        tensor = order.to_stored(tensor)
    if not is_dtensor(sharded):
        return tensor
    return replicated_like(tensor, sharded)
