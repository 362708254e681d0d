"""Fused torch kernels for the last elements of a chain.

If a chain ends in Adam, momentum or the plain gradient, with decay and scalar factors, one torch kernel computes these
elements. The kernel writes the parameters in one pass over memory. The formulas are the same:
`tests/optim/test_transform_elements.py` compares the results of kernels and elements.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thrifty.core.gradient_transform import (
    GradientTransform,
    Scalars,
    Slots,
    TransformChain,
    TransformScope,
    changes_updates,
)
from thrifty.core.shard_layout import local_tensors
from thrifty.optim.chunked_update import product
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleByAdam, ScaleByMomentum, ScaleBySchedule


class FusedUpdate:
    """Update by a fused kernel of torch, in groups of parameters with equal weight decay, because a kernel accepts one
    decay value per list."""

    def __init__(self, factors: TransformChain, decay: AddDecayedWeights | None):
        self.factors, self.decay = factors, decay

    def lists(self, count: int) -> list[tuple[float, list[int]]]:
        chosen = set(self.decay.chosen) if self.decay else set()
        decay = self.decay.decay if self.decay else 0.0
        split = [(decay, [i for i in range(count) if i in chosen]), (0.0, [i for i in range(count) if i not in chosen])]
        return [(decay, own) for decay, own in split if own]

    def rate(self, numbers: Scalars) -> float:
        return -product(self.factors, numbers)


@contextmanager
def kernel_layouts(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield lists of tensors, one entry per parameter, in memory layouts that torch's fused kernels accept.

    The kernels process elements in memory order and ignore strides. If the tensors of one parameter have gaps or
    different memory orders, contiguous copies replace them. At the end of the `with` block the copies are written back.
    """
    odd = [i for i, own in enumerate(zip(*lists, strict=True)) if not _same_layout(own)]
    if not odd:
        yield list(lists)
        return
    contiguous = [
        [tensor.contiguous() if i in odd else tensor for i, tensor in enumerate(tensors)] for tensors in lists
    ]
    yield contiguous
    for tensors, copies in zip(lists, contiguous, strict=True):
        for i in odd:
            if copies[i] is not tensors[i]:
                tensors[i].copy_(copies[i])


def _same_layout(tensors: Sequence[Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = {tensor.stride() for tensor in tensors}
    return len(strides) == 1 and torch.ops.aten.is_non_overlapping_and_dense(tensors[0])


class FusedAdamWUpdate(FusedUpdate):
    """The last elements `scale_by_adam · add_decayed_weights? · factors`, computed by torch's fused AdamW."""

    def __init__(self, key: str, adam: ScaleByAdam, decay: AddDecayedWeights | None, factors: TransformChain):
        super().__init__(factors, decay)
        self.key, self.adam = key, adam

    def apply(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        lists = [parameters, gradients, slots[f"{self.key}.mean"], slots[f"{self.key}.square"]]
        count = float(numbers[f"{self.key}.count"])
        for weight_decay, own in self.lists(len(parameters)):
            chosen = (local_tensors([tensors[i] for i in own]) for tensors in lists)
            fused_adamw(self.adam, *chosen, count, self.rate(numbers), weight_decay)


def fused_adamw(
    adam: ScaleByAdam,
    parameters: list[Tensor],
    gradients: list[Tensor],
    mean: list[Tensor],
    square: list[Tensor],
    count: float,
    rate: float,
    weight_decay: float,
) -> None:
    """Run the `count`-th step of AdamW with torch's fused kernel."""
    # the kernel only reads the counts, so all parameters of a device can share one tensor
    counts = {device: torch.tensor(count, device=device) for device in {p.device for p in parameters}}
    with kernel_layouts(parameters, gradients, mean, square) as lists:
        torch._fused_adamw_(
            *lists,
            [],
            [counts[parameter.device] for parameter in parameters],
            lr=rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            weight_decay=weight_decay,
            eps=adam.eps,
            amsgrad=False,
            maximize=False,
        )


class FusedAdamTransform(GradientTransform):
    """`ScaleByAdam` and the decay after it, if other elements follow. The kernel adds a step of learning rate -1 to the
    decay term, or to zeros.
    """

    reach = TransformScope.ROWS

    def __init__(self, adam: ScaleByAdam, decay: AddDecayedWeights | None = None):
        self.adam, self.decay = adam, decay

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        return FusedAdamTransform(self.adam, self.decay.subset(indices) if self.decay else None)

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        decay = self.decay.decay if self.decay else 0.0
        chosen = set(self.decay.chosen) if self.decay and decay else set()
        steps = [p * decay if i in chosen else torch.zeros_like(p) for i, p in enumerate(parameters)]
        # without a first moment, pass the gradients as the moment: the kernel then writes back the same values
        mean = slots["mean"] if self.adam.beta1 else updates
        fused_adamw(self.adam, steps, updates, mean, slots["square"], float(numbers["count"]), -1.0, 0.0)
        return steps


class FusedSGDUpdate(FusedUpdate):
    """The last elements `add_decayed_weights? · scale_by_momentum? · factors`, computed by torch's fused SGD."""

    def __init__(
        self, key: str, momentum: ScaleByMomentum | None, decay: AddDecayedWeights | None, factors: TransformChain
    ):
        super().__init__(factors, decay)
        self.key, self.momentum = key, momentum

    def apply(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        lists = [parameters, gradients, *([slots[f"{self.key}.momentum"]] if self.momentum else [])]
        for weight_decay, own in self.lists(len(parameters)):
            chosen = (local_tensors([tensors[i] for i in own]) for tensors in lists)
            with kernel_layouts(*chosen) as (moved, moved_gradients, *momentum):
                torch._fused_sgd_(
                    moved,
                    moved_gradients,
                    *(momentum or [[]]),
                    weight_decay=weight_decay,
                    momentum=self.momentum.decay if self.momentum else 0.0,
                    lr=self.rate(numbers),
                    dampening=0.0,
                    nesterov=self.momentum.nesterov if self.momentum else False,
                    maximize=False,
                    is_first_step=False,  # the momentum starts at zero, so the first step needs no exception
                )


def fused_tail(chain: TransformChain) -> tuple[TransformChain, FusedUpdate] | None:
    """Return the elements before a fused kernel, and the kernel for the remaining elements. Return None if no kernel
    computes the last elements.
    """
    inner, factors = without_factors(
        chain.part([key for key, element in chain.elements.items() if changes_updates(element)])
    )
    rest = list(inner.elements.items())
    decay = rest.pop()[1] if rest and type(rest[-1][1]) is AddDecayedWeights else None
    if rest and type(rest[-1][1]) is ScaleByAdam and rest[-1][1].correct and rest[-1][1].beta1:
        key, adam = rest.pop()
        return chain.part([key for key, _ in rest]), FusedAdamWUpdate(key, adam, decay, factors)
    if not rest:
        return chain.part([]), FusedSGDUpdate("", None, decay, factors)
    if decay is not None or type(rest[-1][1]) is not ScaleByMomentum:
        return None
    key, momentum = rest.pop()
    decay = rest.pop()[1] if rest and type(rest[-1][1]) is AddDecayedWeights else None
    return chain.part([key for key, _ in rest]), FusedSGDUpdate(key, momentum, decay, factors)


def without_factors(chain: TransformChain) -> tuple[TransformChain, TransformChain]:
    """Split a chain into its last scalar factors and the elements before them. Return the elements first."""
    keys = list(chain.elements)
    end = len(keys)
    while end and type(chain.elements[keys[end - 1]]) is ScaleBySchedule:
        end -= 1
    return chain.part(keys[:end]), chain.part(keys[end:])


def fuse_elements(chain: TransformChain) -> TransformChain:
    """Return a chain in which a transform with the fused kernel replaces `ScaleByAdam` and the decay after it."""
    fused = TransformChain([])
    before = ""
    for key, element in chain.elements.items():
        last = fused.elements.get(before)
        if type(element) is ScaleByAdam and element.correct:
            fused.elements[key] = FusedAdamTransform(element)
        elif type(last) is FusedAdamTransform and last.decay is None and type(element) is AddDecayedWeights:
            fused.elements[before] = FusedAdamTransform(last.adam, element)
            continue
        else:
            fused.elements[key] = element
        before = key
    return fused
