"""How the tail of a transform is run: as one of torch's fused kernels where it is one, else in pieces.

A chain states what is computed; when its tail is Adam or momentum with decay and scalar factors, one pass over memory
does all of it and writes the parameters directly. Nothing here changes a formula: `tests/core/test_transforms.py` holds
the fused and the element-wise result together.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from thrifty.core.elements import AddDecayedWeights, ScaleByAdam, ScaleByMomentum, ScaleBySchedule
from thrifty.core.pieces import InPieces
from thrifty.core.transforms import Chain, Numbers, Reach, Slots, moves


class Tail(Protocol):
    """Updates gradients and adds the result to the parameters."""

    def apply(
        self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers, age: int
    ) -> None: ...


class _Decayed:
    """What fused kernels take as one number for a whole list: the parameters with weight decay, and those without."""

    def __init__(self, factors: Chain, decay: AddDecayedWeights | None):
        self.factors, self.decay = factors, decay

    def lists(self, count: int) -> list[tuple[float, list[int]]]:
        chosen = set(self.decay.chosen) if self.decay else set()
        decay = self.decay.decay if self.decay else 0.0
        split = [(decay, [i for i in range(count) if i in chosen]), (0.0, [i for i in range(count) if i not in chosen])]
        return [(decay, own) for decay, own in split if own]

    def rate(self, numbers: Numbers) -> float:
        rate = -1.0
        for key in self.factors.elements:
            rate *= float(numbers[f"{key}.factor"])
        return rate


class FusedAdamW(_Decayed):
    """The tail `scale_by_adam · add_decayed_weights? · factors`, as torch's fused AdamW."""

    def __init__(self, key: str, adam: ScaleByAdam, decay: AddDecayedWeights | None, factors: Chain):
        super().__init__(factors, decay)
        self.key, self.adam = key, adam

    def apply(
        self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers, age: int
    ) -> None:
        mean, square = slots[f"{self.key}.mean"], slots[f"{self.key}.square"]
        for weight_decay, own in self.lists(len(parameters)):
            torch._fused_adamw_(
                [parameters[i] for i in own],
                [gradients[i] for i in own],
                [mean[i] for i in own],
                [square[i] for i in own],
                [],
                [torch.tensor(float(age + 1), device=parameters[i].device) for i in own],
                lr=self.rate(numbers),
                beta1=self.adam.beta1,
                beta2=self.adam.beta2,
                weight_decay=weight_decay,
                eps=self.adam.eps,
                amsgrad=False,
                maximize=False,
            )


class FusedSGD(_Decayed):
    """The tail `add_decayed_weights? · scale_by_momentum · factors`, as torch's fused SGD."""

    def __init__(self, key: str, momentum: ScaleByMomentum, decay: AddDecayedWeights | None, factors: Chain):
        super().__init__(factors, decay)
        self.key, self.momentum = key, momentum

    def apply(
        self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers, age: int
    ) -> None:
        momentum = slots[f"{self.key}.momentum"]
        for weight_decay, own in self.lists(len(parameters)):
            torch._fused_sgd_(
                [parameters[i] for i in own],
                [gradients[i] for i in own],
                [momentum[i] for i in own],
                weight_decay=weight_decay,
                momentum=self.momentum.decay,
                lr=self.rate(numbers),
                dampening=0.0,
                nesterov=self.momentum.nesterov,
                maximize=False,
                is_first_step=False,  # the sum starts at zero, so that the first step is like any other
            )


def fused_tail(chain: Chain) -> tuple[Chain, Tail] | None:
    """What of a chain is run element by element, and the fused kernel for the rest; None where there is none."""
    keys = [key for key, element in chain.elements.items() if moves(element)]
    end = len(keys)
    while end and type(chain.elements[keys[end - 1]]) is ScaleBySchedule:
        end -= 1
    factors = chain.part(keys[end:])
    before = [(key, chain.elements[key]) for key in keys[:end]]
    if not factors.elements or not before:
        return None
    adamw = before[-2:] if type(before[-1][1]) is AddDecayedWeights else [*before[-1:], ("", None)]
    if type(adamw[0][1]) is ScaleByAdam and adamw[0][1].correct:
        (key, adam), (_, decay) = adamw
        return chain.part(keys[: keys.index(key)]), FusedAdamW(key, adam, decay, factors)  # type: ignore[arg-type]
    key, momentum = before[-1]
    if type(momentum) is not ScaleByMomentum:
        return None
    decay = before[-2][1] if len(before) > 1 and type(before[-2][1]) is AddDecayedWeights else None
    taken = 2 if decay else 1
    return chain.part(keys[: end - taken]), FusedSGD(key, momentum, decay, factors)  # type: ignore[arg-type]


def split(chain: Chain, parameters: Sequence[Tensor]) -> tuple[Chain, Tail]:
    """A chain as what must see all parameters together, and a tail that need not."""
    if found := fused_tail(chain):
        return found
    keys = [key for key, element in chain.elements.items() if moves(element)]
    far = max((i + 1 for i, key in enumerate(keys) if chain.elements[key].reach is Reach.ALL), default=0)
    return chain.part(keys[:far]), InPieces(chain.part(keys[far:]), parameters)
