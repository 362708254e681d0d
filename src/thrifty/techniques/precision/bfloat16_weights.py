"""bfloat16 weights (Zamirai et al. 2020): store parameters and gradients in 16 bits; update in float32.

Paper       Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv 2010.06192); stochastic rounding of Gupta et al.
            2015 (arXiv 1502.02551), compensation of Kahan 1965.
Promise     2 bytes per weight and 2 per gradient instead of 4 and 4, and 16-bit activations. Rounding loses no update
            on average.
Use         model, optimizer = thrifty.apply((model, optimizer), "bfloat16_weights")
Start with  `bfloat16_weights:rounding=stochastic`; `rounding=kahan` adds 8 bits of mantissa for 2 more bytes per
            weight.
Cost        Weights have 8 bits of mantissa, and stochastic rounding adds noise of that size.
Avoid       Many micro-batches or ranks: their gradients are summed in 16 bits, also for clipping.
Does not    Keep norms, biases and the residual stream in float32, as precision.mixed does. Convert buffers.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.gradient_transform import (
    COMPENSATION,
    Content,
    GradientTransform,
    Scalars,
    Slots,
    TransformChain,
    TransformScope,
    chain,
    changes_updates,
)
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import seed_of
from thrifty.core.run_notes import add_note
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.stochastic_rounding import round_to_bfloat16
from thrifty.modeling.parameter_kinds import stand_in_for
from thrifty.optim.fused_updates import FusedUpdate, fuse_elements, fused_tail
from thrifty.optim.parameter_partition import ParameterPartition
from thrifty.optim.transform_elements import SelectiveTransform

Rounding = Literal["stochastic", "kahan", "nearest"]


def round_stochastically(sums: Tensor, seed: int | Tensor) -> Tensor:
    """float32 in bfloat16, rounded by the value of a number, its column and the step's seed: whoever holds whichever
    rows rounds them alike."""
    # a vector counts as one column, since a part of it does not know where in it it begins
    rows = sums if sums.ndim > 1 else sums.view(-1, 1)
    return round_to_bfloat16(rows, seed).view_as(sums)


def round_with_compensation(sums: Tensor, seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """float32 as the nearest in bfloat16, and what that cut off, in bfloat16 too: rounded by chance, since the small
    updates that add up in it would be off by the same few per cent each time."""
    near = sums.bfloat16()
    return near, round_stochastically(sums - near, seed)


class Float32Update(GradientTransform):
    """A chain for weights in bfloat16: it sees gradients and weights in float32, and weights become the rounded sum.

    What is returned is the difference of two bfloat16 numbers. Added in float32 it gives the second of them exactly,
    unless a step makes a weight smaller by more than 2^14: then it is off by a last bit of the larger one in float32.
    """

    name = "in_float32"
    weights = frozenset({COMPENSATION})

    def __init__(self, inner: TransformChain, rounding: Rounding):
        self.inner, self.rounding = inner, rounding
        self.before: TransformChain = inner
        self.kernel: FusedUpdate | None = None

    @property
    def reach(self) -> TransformScope:  # type: ignore[override]
        return self.inner.reach

    def scalars(self, step: int, age: int) -> dict[str, float]:
        chance = seed_of(f"{self.name}/{step}") % 2**16 - 2**15
        return {**self.inner.scalars(step, age), "rounding_seed": float(chance)}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        slots = self.inner.init(names, [stand_in_for(each, each.detach().float()) for each in parameters])
        if self.rounding == "kahan":
            slots[COMPENSATION] = [torch.zeros_like(parameter) for parameter in parameters]
        return slots

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        sums = [parameter.float() for parameter in parameters]
        if self.rounding == "kahan":
            torch._foreach_add_(sums, slots[COMPENSATION])
        changes = self.before.update([update.float() for update in updates], slots, sums, numbers)
        if self.kernel is None:
            torch._foreach_add_(sums, changes)
        else:
            self.kernel.apply(changes, slots, sums, numbers)
        self._round(sums, slots, numbers)
        torch._foreach_sub_(sums, parameters)
        return sums

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        self.inner.after_step(slots, parameters, numbers)

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        return self.inner.eval_weights(slots, parameters, numbers)

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        self.inner.apply_constraints(slots, parameters)

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        some = copy(self)
        some.inner = chain(self.inner.subset(indices))
        # parts are run by kernels where there are some; what is compiled is not divided into parts
        before, some.kernel = fused_tail(some.inner) or (some.inner, None)
        some.before = fuse_elements(before)
        return some

    def slot_kind(self, slot: str) -> Content:
        return "differences" if slot in self.weights else self.inner.slot_kind(slot)

    def owner(self, slot: str) -> str:
        return "" if slot in self.weights else self.inner.owner(slot)

    def rate(self, numbers: Scalars) -> float:
        return self.inner.rate(numbers)

    def _round(self, sums: list[Tensor], slots: Slots, numbers: Scalars) -> None:
        """Each sum as bfloat16 will hold it, still in float32."""
        seed = numbers["rounding_seed"]
        seed = seed.to(torch.int16) if isinstance(seed, Tensor) else int(seed)
        kept = local_tensors(slots[COMPENSATION]) if self.rounding == "kahan" else []
        for index, sum_here in enumerate(local_tensors(sums)):
            if self.rounding == "kahan":
                near, cut = round_with_compensation(sum_here, seed)
                kept[index].copy_(cut)
            else:
                near = round_stochastically(sum_here, seed) if self.rounding == "stochastic" else sum_here.bfloat16()
            sum_here.copy_(near)


def update_in_float32(transform: GradientTransform, rounding: Rounding = "stochastic") -> GradientTransform:
    """Any transform for parameters in bfloat16: `update_in_float32(adamw(1e-3))`.

    What must see all gradients together and remembers nothing, such as clipping, comes first and acts on them as they
    are, so that all that follows can be run in pieces and float32 is never more than those.
    """
    elements = list(chain(transform).elements.values())
    moving = [element for element in elements if changes_updates(element)]
    leading = list(
        takewhile(lambda element: type(element).init in (GradientTransform.init, SelectiveTransform.init), moving)
    )
    far = max((i + 1 for i, element in enumerate(leading) if element.reach is TransformScope.ALL), default=0)
    # what only follows the weights sees them as they are
    following = [element for element in elements if not changes_updates(element)]
    return chain(*moving[:far], _rounded(moving[far:], rounding), *following)


def _rounded(elements: Sequence[GradientTransform], rounding: Rounding) -> GradientTransform:
    """Elements in float32 with the rounding behind them: behind each member's own where there is a partition, so that
    each can be run in the pieces that it allows."""
    for index, element in enumerate(elements):
        before, after = elements[:index], elements[index + 1 :]
        if isinstance(element, ParameterPartition) and all(
            other.reach is not TransformScope.ALL for other in (*before, *after)
        ):
            parts = copy(element)
            parts.rules = {
                # elements learn the parameters that they meet, so that each member needs its own
                label: (
                    rule,
                    _rounded([*deepcopy(before), *chain(inner).elements.values(), *deepcopy(after)], rounding),
                )
                for label, (rule, inner) in element.rules.items()
            }
            return parts
    return Float32Update(chain(*elements), rounding)


class Bfloat16InputObjective(WrappedObjective):
    """Another objective with the numbers that the model is given in its own format. What follows the logits is
    float32: objectives see to that themselves."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        fields = {
            name: field.bfloat16() if field.is_floating_point() else field for name, field in batch.fields.items()
        }
        return super().predict(model, replace(batch, fields=fields))


class Bfloat16Weights(Technique):
    """The optimizer receives gradients and weights in float32, and keeps its moments in float32 or in the format of
    `precision.optimizer_state`. "nearest" exists for comparison: in bfloat16, 1 + 1e-3 rounds to 1, so that small
    updates are lost. Transforms that need all parameters at once, such as sparsity.rigl, make one float32 copy."""

    stage, numerics = Stage.PRECISION, Numerics.DIFFERENT
    claims = frozenset({Claim.PRECISION})

    rounding: Rounding = "stochastic"
    """Of each new weight: by chance, to the nearest with what that cuts off kept, or to the nearest and no more."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        if any(getattr(module, "running_mean", None) is not None for module in model.modules()):
            raise RefusedError(
                "BatchNorm requires weights in the format of its running statistics, float32",
                fix=f"--with precision.mixed --without {self.name}",
            )
        parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        for parameter in parameters:
            parameter.data = parameter.data.bfloat16()
        add_note(
            f"{sum(map(torch.numel, parameters)):,} numbers in {len(parameters)} parameters; buffers stay as they are"
        )
        return model

    def objective(self, objective: Objective) -> Objective:
        return Bfloat16InputObjective(objective)

    def change_forward(self, model: nn.Module) -> None:
        def cast(model: nn.Module, args: Any, kwargs: Any) -> Any:
            to_bfloat16 = lambda each: each.bfloat16() if each.is_floating_point() else each  # noqa: E731
            return tree_map_only(Tensor, to_bfloat16, (args, kwargs))

        model.register_forward_pre_hook(cast, with_kwargs=True)

    def update(self, transform: GradientTransform) -> GradientTransform:
        return update_in_float32(transform, self.rounding)

    def finish(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        return model
