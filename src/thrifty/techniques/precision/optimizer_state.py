"""8-bit optimizer state (Dettmers et al. 2022): quantize gradient moments to int8 or bfloat16.

Paper       Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861). Stochastic rounding:
            Gupta et al. 2015 (arXiv 1502.02551).
Promise     Each element of a moment takes a little over 1 byte (int8) or 2 bytes (bfloat16) instead of 4, for any
            optimizer.
Use         model, optimizer = thrifty.apply((model, optimizer), "optimizer_state", format="int8")
Start with  `optimizer_state:format=int8`. Use bfloat16 for a beta2 above 0.9997.
Cost        Every step dequantizes and quantizes the moments, in chunks that fit in the cache.
Avoid       Small models, because their state is small. Models whose updates already dominate the step time.
Does not    Quantize weights, weight averages, vectors, or tensors with fewer than `min_elements` elements.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.gradient_transform import (
    Content,
    GradientTransform,
    Scalars,
    Slots,
    TransformChain,
    TransformScope,
    chain,
    changes_updates,
)
from thrifty.core.randomness import seed_of
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive
from thrifty.core.shard_layout import local_tensor
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.fused_updates import fuse_elements
from thrifty.optim.moment_formats import (
    SHORTEST_ROW,
    Bfloat16Format,
    Int8Format,
    Seed,
    StateFormat,
    divided_like,
)
from thrifty.optim.parameter_partition import ParameterPartition
from thrifty.optim.transform_elements import SelectiveTransform


class CompactStateTransform(GradientTransform):
    """A transform that stores the large moments of another transform, `element`, in fewer bits between steps.

    The wrapped transform itself receives float32. State slots keep their names, and additional slots store the scales.
    Other moments stay in float32.
    """

    def __init__(self, element: GradientTransform, form: StateFormat, smallest: int):
        self.element, self.form, self.smallest = element, form, smallest
        self.name, self.born = element.name, element.born
        self.weights, self.squares = element.weights, element.squares
        self.stored: dict[str, dict[int, int]] = {}
        """Number of quantized blocks per row on this rank, by slot and parameter."""
        self.unfit = ""
        """Words for the first large moment whose dtype cannot be quantized, if no moment is."""
        self.others: Sequence[CompactStateTransform] | None = None
        """For the last of the wrapped transforms of an optimizer, which checks all of them: those before it."""

    @property
    def reach(self) -> TransformScope:  # type: ignore[override]
        return self.element.reach

    def scalars(self, step: int, age: int) -> dict[str, float]:
        rounding_seed = seed_of(f"{self.name}/{step}") % 2**16 - 2**15
        return {**self.element.scalars(step, age), "rounding_seed": float(rounding_seed)}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        slots: Slots = {}
        for slot, moments in self.element.init(names, parameters).items():
            pairs = [] if slot in self.weights else zip(moments, parameters, strict=True)
            blocks = {i: self._blocks(*pair) for i, pair in enumerate(pairs)}
            self.stored[slot] = {i: count for i, count in blocks.items() if count}
            slots[slot] = moments
            if not self.stored[slot]:
                continue
            for part in self.form.parts[1:]:
                slots[slot + part] = [parameter.new_empty(0) for parameter in parameters]
            for i in self.stored[slot]:
                like = moments[i]
                for part, tensor in zip(self.form.parts, self._closed(slot, i, like, None), strict=True):
                    slots[slot + part][i] = divided_like(like, tensor)
        self.unfit = "" if self.is_compact else self._unfit(slots, names, parameters)
        if self.others is not None:
            _refuse_other_dtypes([*self.others, self])
        return slots

    @property
    def is_compact(self) -> bool:
        """True if any moment is quantized."""
        return any(self.stored.values())

    def _unfit(self, slots: Slots, names: Sequence[str], parameters: Sequence[Tensor]) -> str:
        for slot, moments in slots.items():
            for name, moment, parameter in zip(names, moments, parameters, strict=True):
                is_other = moment.is_floating_point() and moment.dtype != torch.float32
                is_moment = slot not in self.weights and moment.shape == parameter.shape
                if is_other and is_moment and is_large(parameter, self.smallest):
                    return f"the moments of {name!r} are {str(moment.dtype).removeprefix('torch.')}"
        return ""

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        opened = self._open(slots)
        updates = self.element.update(updates, opened, parameters, numbers)
        self._close(opened, slots, numbers)
        return updates

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        if type(self.element).after_step is not GradientTransform.after_step:
            opened = self._open(slots)
            self.element.after_step(opened, parameters, numbers)
            self._close(opened, slots, numbers)

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        if type(self.element).eval_weights is GradientTransform.eval_weights:
            return None
        return self.element.eval_weights(self._open(slots), parameters, numbers)

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        if type(self.element).apply_constraints is not GradientTransform.apply_constraints:
            opened = self._open(slots)
            self.element.apply_constraints(opened, parameters)
            self._close(opened, slots, {"rounding_seed": 0.0})

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        part = copy(self)
        # subsets use fused kernels if there are any; a compiled chain is not divided into subsets
        (part.element,) = fuse_elements(chain(self.element.subset(indices))).elements.values()
        part.stored = {
            slot: {place: stored[i] for place, i in enumerate(indices) if i in stored}
            for slot, stored in self.stored.items()
        }
        return part

    def slot_kind(self, slot: str) -> Content:
        return self.element.slot_kind(slot)

    def rate(self, numbers: Scalars) -> float:
        return self.element.rate(numbers)

    def _blocks(self, moment: Tensor, parameter: Tensor) -> int:
        matches = moment.dtype == torch.float32 and moment.shape == parameter.shape
        return self.form.blocks(moment, parameter) if matches and is_large(parameter, self.smallest) else 0

    def _closed(self, slot: str, index: int, moment: Tensor, seed: Seed) -> tuple[Tensor, ...]:
        return self.form.close(local_tensor(moment), slot in self.squares, seed, self.stored[slot][index])

    def _open(self, slots: Slots) -> Slots:
        opened: Slots = {}
        for slot, stored in self.stored.items():
            opened[slot] = list(slots[slot])
            for i in stored:
                parts = [local_tensor(slots[slot + part][i]) for part in self.form.parts]
                opened[slot][i] = divided_like(slots[slot][i], self.form.open(parts, slot in self.squares))
        return opened

    def _close(self, opened: Slots, slots: Slots, numbers: Scalars) -> None:
        seed = numbers["rounding_seed"]
        seed = seed.to(torch.int16) if isinstance(seed, Tensor) else int(seed)
        for slot, stored in self.stored.items():
            for i in stored:
                for part, tensor in zip(self.form.parts, self._closed(slot, i, opened[slot][i], seed), strict=True):
                    local_tensor(slots[slot + part][i]).copy_(tensor)


def is_large(parameter: Tensor, smallest: int) -> bool:
    """Return True if a parameter is a matrix of at least `smallest` elements, with rows long enough to quantize."""
    if parameter.ndim < 2 or parameter.numel() < smallest:
        return False
    return parameter.numel() >= SHORTEST_ROW * parameter.shape[0]


def with_compact_state(
    transform: GradientTransform, form: Callable[[], StateFormat] = Int8Format, smallest: int = 4096
) -> GradientTransform:
    """Return a transform that stores its moments in fewer bits, as in `with_compact_state(lion(1e-4), Bfloat16Format)`.

    Each transform of a chain is wrapped separately, so it can still run on subsets of the parameters.
    """
    made: list[CompactStateTransform] = []

    def wrapped(transform: GradientTransform) -> GradientTransform:
        if type(transform) is TransformChain:
            return chain(*map(wrapped, transform.elements.values()))
        if isinstance(transform, ParameterPartition):
            return transform.mapped(wrapped)
        if not changes_updates(transform) or type(transform).init in (GradientTransform.init, SelectiveTransform.init):
            return transform
        made.append(CompactStateTransform(transform, form(), smallest))
        return made[-1]

    result = wrapped(transform)
    if made:
        made[-1].others = made[:-1]
    return result


def _refuse_other_dtypes(transforms: Sequence[CompactStateTransform]) -> None:
    """Raise RefusedError if these transforms quantize no moment, because large moments are not float32."""
    unfit = next((each.unfit for each in transforms if each.unfit), "")
    if unfit and not any(each.is_compact for each in transforms):
        raise RefusedError(
            f"{OptimizerState.name}: {unfit}, and only float32 moments are quantized",
            fix="model.float() before the optimizer is built; or, for 16-bit weights, "
            "thrifty.apply((model, optimizer), 'bfloat16_weights')",
        )


FORMATS: dict[str, Callable[[], StateFormat]] = {"int8": Int8Format, "bfloat16": Bfloat16Format}


class OptimizerState(Technique):
    """int8 uses one scale per block of up to 256 elements. If tensor parallelism divides rows into parts without a
    divisor from 16 to 256, the moments stay in float32. Rounding is stochastic. With rounding to nearest, slow averages
    stall because small changes are lost. In int8, stochastic rounding works up to a beta2 of about 0.9997. In bfloat16
    it also works above 0.9997."""

    stage, numerics, tolerance = Stage.PRECISION, Numerics.ROUNDING, 1e-3
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.TRAINED_VECTORS: "the model has no matrix whose moments could be quantized"
    }

    format: Literal["int8", "bfloat16"] = "int8"
    min_elements: Positive = 4096
    """Minimum number of elements of a parameter whose moments are quantized."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"model"})

    def model(self, model: nn.Module) -> nn.Module:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        large = [parameter for parameter in trained if is_large(parameter, self.min_elements)]
        if not large:
            raise RefusedError(
                f"no matrix of the model has at least {self.min_elements} elements, in rows of at least {SHORTEST_ROW}",
                fix=f"--without {self.name}; or --set techniques.{self.name}.min_elements=1",
            )
        share = sum(map(torch.numel, large)) / sum(map(torch.numel, trained))
        add_note(f"{len(large)} matrices, {share:.1%} of the trained elements; other moments stay in float32")
        return model

    def update(self, transform: GradientTransform) -> GradientTransform:
        return with_compact_state(transform, FORMATS[self.format], self.min_elements)
