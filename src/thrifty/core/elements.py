"""The elements that several optimizers share: momentum, Adam, decay, trust ratio, clipping, factors."""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from thrifty.core.parameters import is_matrix
from thrifty.core.transforms import Numbers, Reach, Rule, Slots, Transform


class ScaleByMomentum(Transform):
    """A decaying sum of gradients, v = decay · v + g (Polyak 1964), or with `nesterov` a step ahead of it,
    g + decay · v (Sutskever et al. 2013)."""

    name = "scale_by_momentum"
    reach = Reach.ROWS

    def __init__(self, decay: float = 0.9, nesterov: bool = False):
        self.decay, self.nesterov = decay, nesterov

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"momentum": [torch.zeros_like(parameter) for parameter in parameters]}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        momentum = slots["momentum"]
        torch._foreach_mul_(momentum, self.decay)
        torch._foreach_add_(momentum, updates)
        if self.nesterov:
            torch._foreach_add_(updates, momentum, alpha=self.decay)
            return updates
        return [tensor.clone() for tensor in momentum]


class ScaleByAdam(Transform):
    """Bias-corrected first moment over the root of the second (Kingma & Ba 2015, algorithm 1)."""

    name = "scale_by_adam"
    reach = Reach.ROWS

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, correct: bool = True):
        self.beta1, self.beta2, self.eps, self.correct = beta1, beta2, eps, correct

    def numbers(self, step: int, age: int) -> dict[str, float]:
        if not self.correct:
            return {"mean_correction": 1.0, "root_correction": 1.0}
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


class Selective(Transform):
    """What elements share that act on the parameters of a rule alone: which those are, by index."""

    def __init__(self, where: Rule):
        self.where = where
        self.chosen: list[int] = []

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.chosen = [i for i, pair in enumerate(zip(names, parameters, strict=True)) if self.where(*pair)]
        return {}

    def only(self, indices: Sequence[int]) -> Transform:
        some = copy(self)
        some.chosen = [place for place, i in enumerate(indices) if i in self.chosen]
        return some


class AddDecayedWeights(Selective):
    """Adds decay · parameter where the toolkit's rule says so: after the moments that is decoupled weight decay
    (Loshchilov & Hutter 2019), before them L2 regularisation."""

    name = "add_decayed_weights"
    reach = Reach.ROWS

    def __init__(self, decay: float, where: Rule = is_matrix):
        super().__init__(where)
        self.decay = decay

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        if self.decay and self.chosen:
            own = [updates[i] for i in self.chosen]
            torch._foreach_add_(own, [parameters[i] for i in self.chosen], alpha=self.decay)
        return updates


class ScaleParameters(Selective):
    """Multiplies the updates of some parameters by a constant: a learning rate of their own."""

    name = "scale_parameters"
    reach = Reach.ROWS

    def __init__(self, factor: float, where: Rule):
        super().__init__(where)
        self.factor = factor

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        if self.chosen:
            torch._foreach_mul_([updates[i] for i in self.chosen], self.factor)
        return updates


class ScaleBySchedule(Transform):
    """Multiplies by a number that depends on the step alone."""

    reach = Reach.ROWS

    def __init__(self, factor: Callable[[int], float], name: str = "scale_by_schedule"):
        self.factor, self.name = factor, name

    def numbers(self, step: int, age: int) -> dict[str, float]:
        return {"factor": self.factor(step)}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        torch._foreach_mul_(updates, numbers["factor"])
        return updates

    def rate(self, numbers: Numbers) -> float:
        return abs(float(numbers["factor"]))


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
