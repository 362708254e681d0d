"""Gradient transforms: small elements that turn gradients into updates, chained behind one torch optimizer.

An element is a function of lists of tensors, one entry per parameter:

    numbers(step, age)                          the scalars of this step (rates, bias corrections)
    init(names, parameters)                     its state: slot name -> one tensor per parameter
    update(updates, slots, parameters, numbers) what it does; it owns `updates` and may overwrite them

Numbers are computed apart so that `update` is pure arithmetic that torch.compile can trace once for all steps.
`chain` runs elements in order, `partition` gives each parameter to exactly one of several. Where a whole run of
elements is one of torch's fused kernels, `fused.py` calls that; the elements remain the meaning and the reference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.parameters import is_matrix

Slots = dict[str, list[Tensor]]
Numbers = Mapping[str, float | Tensor]
Rule = Callable[[str, Tensor], bool]


class Transform:
    """The identity, and what an element may override."""

    name = "identity"

    def numbers(self, step: int, age: int) -> dict[str, float]:
        """`step` counts the run's finished updates, `age` those since the state was last fresh; both start at 0."""
        return {}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        return updates


def _under(prefix: str, mapping: Mapping[str, object]) -> dict:
    """The entries of a mapping below `prefix.`, without it."""
    return {key[len(prefix) + 1 :]: value for key, value in mapping.items() if key.startswith(prefix + ".")}


class Chain(Transform):
    name = "chain"

    def __init__(self, elements: Sequence[Transform]):
        self.elements: dict[str, Transform] = {}
        for element in elements:
            taken = sum(key.split("#")[0] == element.name for key in self.elements)
            self.elements[f"{element.name}#{taken + 1}" if taken else element.name] = element

    def numbers(self, step: int, age: int) -> dict[str, float]:
        return {
            f"{key}.{name}": value
            for key, element in self.elements.items()
            for name, value in element.numbers(step, age).items()
        }

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {
            f"{key}.{slot}": tensors
            for key, element in self.elements.items()
            for slot, tensors in element.init(names, parameters).items()
        }

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        for key, element in self.elements.items():
            updates = element.update(updates, _under(key, slots), parameters, _under(key, numbers))
        return updates


def chain(*elements: Transform) -> Chain:
    """One transform after the other; chains inside are opened, so that chain(chain(a, b), c) is chain(a, b, c)."""
    flat: list[Transform] = []
    for element in elements:
        if type(element) is Chain:
            flat.extend(element.elements.values())
        elif type(element) is not Transform:
            flat.append(element)
    return Chain(flat)


class Partition(Transform):
    """Each parameter goes to the first rule it meets; a parameter that meets none is an error, not a default."""

    name = "partition"

    def __init__(self, rules: Iterable[tuple[str, Rule, Transform]]):
        self.rules = {label: (rule, transform) for label, rule, transform in rules}
        self.members: dict[str, list[int]] = {}

    def numbers(self, step: int, age: int) -> dict[str, float]:
        return {
            f"{label}.{name}": value
            for label, (_, transform) in self.rules.items()
            for name, value in transform.numbers(step, age).items()
        }

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.members = {label: [] for label in self.rules}
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            label = next((label for label, (rule, _) in self.rules.items() if rule(name, parameter)), None)
            if label is None:
                raise UsageError(
                    f"partition: no rule covers parameter {name!r} of shape {tuple(parameter.shape)}",
                    fix='add a last rule ("rest", lambda name, parameter: True, …)',
                )
            self.members[label].append(index)
        slots: Slots = {}
        for label, (_, transform) in self.rules.items():
            own = self.members[label]
            inner = transform.init([names[i] for i in own], [parameters[i] for i in own])
            for slot, tensors in inner.items():
                # parameters of other members hold an empty place, so that every slot has one entry per parameter
                filled = [parameter.new_empty(0) for parameter in parameters]
                for index, tensor in zip(own, tensors, strict=True):
                    filled[index] = tensor
                slots[f"{label}.{slot}"] = filled
        return slots

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        result = list(updates)
        for label, (_, transform) in self.rules.items():
            own = self.members[label]
            inner = {slot: [tensors[i] for i in own] for slot, tensors in _under(label, slots).items()}
            changed = transform.update(
                [updates[i] for i in own], inner, [parameters[i] for i in own], _under(label, numbers)
            )
            for index, update in zip(own, changed, strict=True):
                result[index] = update
        return result


def partition(*rules: tuple[str, Rule, Transform]) -> Partition:
    """`partition(("matrices", is_matrix, chain(…)), ("rest", lambda n, p: True, chain(…)))`."""
    return Partition(rules)


class ScaleByAdam(Transform):
    """Bias-corrected first moment over the root of the second (Kingma & Ba 2015, algorithm 1)."""

    name = "scale_by_adam"

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def numbers(self, step: int, age: int) -> dict[str, float]:
        return {
            "mean_correction": 1 - self.beta1 ** (age + 1),
            "root_correction": (1 - self.beta2 ** (age + 1)) ** 0.5,
        }

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {
            "mean": [torch.zeros_like(parameter) for parameter in parameters],
            "square": [torch.zeros_like(parameter) for parameter in parameters],
        }

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        mean, square = slots["mean"], slots["square"]
        torch._foreach_lerp_(mean, updates, 1 - self.beta1)
        torch._foreach_mul_(square, self.beta2)
        torch._foreach_addcmul_(square, updates, updates, 1 - self.beta2)
        root = torch._foreach_sqrt(square)
        torch._foreach_div_(root, numbers["root_correction"])
        torch._foreach_add_(root, self.eps)
        torch._foreach_mul_(root, numbers["mean_correction"])
        return list(torch._foreach_div(mean, root))


class ScaleByLion(Transform):
    """The sign of an interpolated momentum, which itself moves after it is used (Chen et al. 2023, program 1)."""

    name = "scale_by_lion"

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99):
        self.beta1, self.beta2 = beta1, beta2

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"momentum": [torch.zeros_like(parameter) for parameter in parameters]}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        momentum = slots["momentum"]
        direction = torch._foreach_lerp(momentum, updates, 1 - self.beta1)
        torch._foreach_sign_(direction)
        torch._foreach_lerp_(momentum, updates, 1 - self.beta2)
        return list(direction)


class AddDecayedWeights(Transform):
    """Decoupled weight decay (Loshchilov & Hutter 2019): adds decay · parameter where the toolkit's rule says so."""

    name = "add_decayed_weights"

    def __init__(self, decay: float, where: Rule = is_matrix):
        self.decay, self.where = decay, where
        self.decayed: list[int] = []

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.decayed = [i for i, pair in enumerate(zip(names, parameters, strict=True)) if self.where(*pair)]
        return {}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        if self.decay and self.decayed:
            chosen = [updates[i] for i in self.decayed]
            torch._foreach_add_(chosen, [parameters[i] for i in self.decayed], alpha=self.decay)
        return updates


class ScaleBySchedule(Transform):
    """Multiplies by a number that depends on the step alone."""

    name = "scale_by_schedule"

    def __init__(self, factor: Callable[[int], float], name: str = "scale_by_schedule"):
        self.factor, self.name = factor, name

    def numbers(self, step: int, age: int) -> dict[str, float]:
        return {"factor": self.factor(step)}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        torch._foreach_mul_(updates, numbers["factor"])
        return updates


def scale_by_learning_rate(rate: float) -> ScaleBySchedule:
    """Turns a direction of ascent into a step of descent: multiplies by -rate."""
    return ScaleBySchedule(lambda step: -rate, name="scale_by_learning_rate")


class ClipByGlobalNorm(Transform):
    """Scales all gradients together so that their joint 2-norm is at most `largest` (Pascanu et al. 2013)."""

    name = "clip_by_global_norm"

    def __init__(self, largest: float):
        self.largest = largest

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        factor = (self.largest / (global_norm(updates) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(updates, factor)
        return updates


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors taken as one vector, a scalar in float32; whole even where the tensors are sharded."""
    norm = torch.nn.utils.get_total_norm(tensors, foreach=True)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
