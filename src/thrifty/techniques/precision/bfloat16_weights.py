"""bfloat16 weights (Zamirai et al. 2020): store parameters and gradients in 16 bits; update in float32.

Paper       Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv 2010.06192). Stochastic rounding is from Gupta et
            al. 2015 (arXiv 1502.02551), compensated summation from Kahan 1965.
Promise     2 bytes per weight and 2 per gradient instead of 4 each, and 16-bit activations. Stochastic rounding is
            unbiased, so small updates survive on average.
Use         model, optimizer = thrifty.apply((model, optimizer), "bfloat16_weights")
Start with  `bfloat16_weights:rounding=stochastic`. `rounding=kahan` adds 8 bits of mantissa, and takes 2 more bytes per
            weight.
Cost        Weights have 8 bits of mantissa. Stochastic rounding adds noise of up to one unit in the last place.
Avoid       Many micro-batches or ranks, because their gradients are summed in 16 bits, and clipping uses these sums.
Does not    Keep norms, biases and the residual stream in float32, unlike precision.mixed, or convert buffers.
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
    """Round float32 values to bfloat16 at random, up or down, without bias.

    The rounding of a value depends only on the value, its column and the step's `seed`. It is therefore the same on one
    rank and on ranks that hold different rows.
    """
    # a vector counts as one column, because the offset of a shard is unknown
    rows = sums if sums.ndim > 1 else sums.view(-1, 1)
    return round_to_bfloat16(rows, seed).view_as(sums)


def round_with_compensation(sums: Tensor, seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 values to the nearest bfloat16. Return the result, and the remainder in bfloat16.

    The remainder is rounded stochastically. Otherwise small updates, which accumulate in the remainder, would have a
    bias of a few per cent.
    """
    nearest = sums.bfloat16()
    return nearest, round_stochastically(sums - nearest, seed)


class Float32Update(GradientTransform):
    """A chain for bfloat16 weights: it receives gradients and weights in float32 and rounds the updated weights.

    The returned update is the difference of two bfloat16 values. Added to the weight in float32, the update yields the
    new weight exactly, unless a step shrinks a weight by a factor above 2^14. In that case the error is one float32 bit
    of the larger value.
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
        rounding_seed = seed_of(f"{self.name}/{step}") % 2**16 - 2**15
        return {**self.inner.scalars(step, age), "rounding_seed": float(rounding_seed)}

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
        part = copy(self)
        part.inner = chain(self.inner.subset(indices))
        # subsets use fused kernels if there are any; a compiled chain is not divided into subsets
        before, part.kernel = fused_tail(part.inner) or (part.inner, None)
        part.before = fuse_elements(before)
        return part

    def slot_kind(self, slot: str) -> Content:
        return "differences" if slot in self.weights else self.inner.slot_kind(slot)

    def owner(self, slot: str) -> str:
        return "" if slot in self.weights else self.inner.owner(slot)

    def rate(self, numbers: Scalars) -> float:
        return self.inner.rate(numbers)

    def _round(self, sums: list[Tensor], slots: Slots, numbers: Scalars) -> None:
        """Round each updated weight to a bfloat16 value, stored in float32."""
        seed = numbers["rounding_seed"]
        seed = seed.to(torch.int16) if isinstance(seed, Tensor) else int(seed)
        compensation = local_tensors(slots[COMPENSATION]) if self.rounding == "kahan" else []
        for index, sum_here in enumerate(local_tensors(sums)):
            if self.rounding == "kahan":
                rounded, remainder = round_with_compensation(sum_here, seed)
                compensation[index].copy_(remainder)
            else:
                rounded = round_stochastically(sum_here, seed) if self.rounding == "stochastic" else sum_here.bfloat16()
            sum_here.copy_(rounded)


def update_in_float32(transform: GradientTransform, rounding: Rounding = "stochastic") -> GradientTransform:
    """Return a transform for bfloat16 parameters, as in `update_in_float32(adamw(1e-3))`.

    Stateless transforms that require all gradients together, such as clipping, run first on bfloat16 gradients. All
    other transforms can then run on subsets of the parameters, and only one subset is in float32 at a time.
    """
    elements = list(chain(transform).elements.values())
    updating = [element for element in elements if changes_updates(element)]
    leading = list(
        takewhile(lambda element: type(element).init in (GradientTransform.init, SelectiveTransform.init), updating)
    )
    count = max((i + 1 for i, element in enumerate(leading) if element.reach is TransformScope.ALL), default=0)
    # transforms that only observe the weights receive them in bfloat16
    observing = [element for element in elements if not changes_updates(element)]
    return chain(*updating[:count], _rounded(updating[count:], rounding), *observing)


def _rounded(elements: Sequence[GradientTransform], rounding: Rounding) -> GradientTransform:
    """Return transforms in float32, followed by rounding.

    In a `ParameterPartition`, each rule's transform gets its own rounding, so that it can run on subsets of the rule's
    parameters.
    """
    for index, element in enumerate(elements):
        before, after = elements[:index], elements[index + 1 :]
        if isinstance(element, ParameterPartition) and all(
            other.reach is not TransformScope.ALL for other in (*before, *after)
        ):
            # transforms store data of their parameters, so each member needs a copy
            return element.mapped(
                lambda inner, before=before, after=after: _rounded(
                    [*deepcopy(before), *chain(inner).elements.values(), *deepcopy(after)], rounding
                )
            )
    return Float32Update(chain(*elements), rounding)


class Bfloat16InputObjective(WrappedObjective):
    """Wrapper of an objective that casts floating-point inputs to bfloat16. Losses are still computed in float32."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        fields = {
            name: field.bfloat16() if field.is_floating_point() else field for name, field in batch.fields.items()
        }
        return super().predict(model, replace(batch, fields=fields))


class Bfloat16Weights(Technique):
    """The optimizer receives gradients and weights in float32, and keeps its moments in float32 or in the format of
    `precision.optimizer_state`. "nearest" exists for comparison: in bfloat16, 1 + 1e-3 rounds to 1, so small updates
    are lost. Transforms that require all parameters at once, such as sparsity.rigl, make one float32 copy of the
    parameters."""

    stage, numerics = Stage.PRECISION, Numerics.DIFFERENT
    claims = frozenset({Claim.PRECISION})

    rounding: Rounding = "stochastic"
    """Rounding of new weights: stochastic, to nearest with a stored remainder ("kahan"), or to nearest."""

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
            f"{sum(map(torch.numel, parameters)):,} elements in {len(parameters)} parameters; buffers keep their format"
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
