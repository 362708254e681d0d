"""Runs of transforms that torch has as one kernel.

A chain states what is computed; when its tail is Adam, decoupled decay and scalar factors, one pass over memory does
all of it and writes the parameters directly. Nothing here changes a formula: `tests/core/test_transforms.py` holds the
fused and the element-wise result together.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.transforms import (
    AddDecayedWeights,
    Chain,
    Numbers,
    ScaleByAdam,
    ScaleBySchedule,
    Slots,
    Transform,
)


class FusedAdamW:
    """The tail `scale_by_adam · add_decayed_weights? · factors` of a chain, as torch's fused AdamW."""

    def __init__(self, adam_key: str, adam: ScaleByAdam, decay: AddDecayedWeights | None, factor_keys: Sequence[str]):
        self.adam_key, self.adam, self.decay, self.factor_keys = adam_key, adam, decay, list(factor_keys)

    def apply(
        self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers, age: int
    ) -> None:
        rate = -math.prod(float(numbers[f"{key}.factor"]) for key in self.factor_keys)
        mean, square = slots[f"{self.adam_key}.mean"], slots[f"{self.adam_key}.square"]
        decayed = set(self.decay.decayed) if self.decay else set()
        for weight_decay, own in (
            (self.decay.decay if self.decay else 0.0, [i for i in range(len(parameters)) if i in decayed]),
            (0.0, [i for i in range(len(parameters)) if i not in decayed]),
        ):
            if own:
                torch._fused_adamw_(
                    [parameters[i] for i in own],
                    [gradients[i] for i in own],
                    [mean[i] for i in own],
                    [square[i] for i in own],
                    [],
                    [torch.tensor(float(age + 1), device=parameters[i].device) for i in own],
                    lr=rate,
                    beta1=self.adam.beta1,
                    beta2=self.adam.beta2,
                    weight_decay=weight_decay,
                    eps=self.adam.eps,
                    amsgrad=False,
                    maximize=False,
                )


def split_fused_tail(transform: Transform) -> tuple[Transform, FusedAdamW | None]:
    """A transform as (what runs element by element, the fused tail), the tail None where there is none."""
    if type(transform) is not Chain:
        return transform, None
    keys = list(transform.elements)
    factors = 0
    while factors < len(keys) and type(transform.elements[keys[-1 - factors]]) is ScaleBySchedule:
        factors += 1
    end = len(keys) - factors
    decay = transform.elements[keys[end - 1]] if end else None
    decay = decay if type(decay) is AddDecayedWeights else None
    place = end - 1 - (decay is not None)
    if not factors or place < 0 or type(adam := transform.elements[keys[place]]) is not ScaleByAdam:
        return transform, None
    head = Chain([])
    head.elements = {key: transform.elements[key] for key in keys[:place]}
    return head, FusedAdamW(keys[place], adam, decay, keys[end:])
