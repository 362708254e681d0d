"""A torch optimizer as a technique, so that its state and step are counted like those of other techniques."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, chain
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique

MakeOptimizer = Callable[[Sequence[str], Sequence[Tensor]], Optimizer]


class TorchStep(GradientTransform):
    """Step of a torch optimizer, which changes the parameters directly. The first step creates the state."""

    name = "torch"

    def __init__(self, make: MakeOptimizer):
        self.make = make

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.inner = self.make(names, parameters)
        self.moved = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        self._step()
        states = [state for parameter in parameters if (state := self.inner.state.get(parameter))]
        return {str(place): _tensors(state) for place, state in enumerate(states)}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        for index in self.moved:
            parameters[index].grad = updates[index]
        self._step()
        return updates

    def _step(self) -> None:
        with _ValuesOfFakes():
            self.inner.step()


class _ValuesOfFakes(TorchDispatchMode):
    """Mode that returns a constant if an optimizer reads a value of a fake tensor. No shape depends on the value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.5 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


class TorchOptimizer(Technique):
    """Torch optimizer that `make` builds for named parameters. The technique is only for counting, not for training."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    make: MakeOptimizer

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(TorchStep(self.make), transform)


class AppliedUpdates(Technique):
    """Updates of techniques that were applied to an optimizer. Their changes of the model were made by `apply`. The
    technique is only for counting, not for training."""

    stage, numerics = Stage.AVERAGE, Numerics.DIFFERENT

    applied: tuple[Technique, ...]

    def update(self, transform: GradientTransform) -> GradientTransform:
        for technique in sorted(self.applied, key=lambda each: each.stage, reverse=True):
            transform = technique.update(transform)
        return transform
