"""Gradient transforms behind one `torch.optim.Optimizer`, usable in anybody's own loop.

optimizer = TransformOptimizer(model.named_parameters(), chain(ScaleByAdam(), scale_by_learning_rate(1e-3)))
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thrifty.core.fused import split_fused_tail
from thrifty.core.transforms import Numbers, Slots, Transform


class TransformOptimizer(torch.optim.Optimizer):
    """Applies a transform to the gradients of named parameters and adds the result to them.

    Only parameters that require a gradient take part; a missing gradient counts as zero. The state is `slots`, one
    tensor per parameter under each slot name, and two counters: `updates` finished, and `born`, the update at which
    the state was last fresh.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], transform: Transform):
        trained = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        super().__init__(list(trained.values()), {})
        self.names, self.parameters = list(trained), list(trained.values())
        self.transform = transform
        self.slots: Slots = transform.init(self.names, self.parameters)
        self.updates, self.born = 0, 0
        self._head, self._tail = split_fused_tail(transform)
        self._transform_and_add: Callable = _transform_and_add
        self._compiled = False

    def compile(self, **options: Any) -> None:
        """Trace the arithmetic once with torch.compile; the numbers of each step go in as tensors."""
        self._transform_and_add, self._compiled = torch.compile(_transform_and_add, **options), True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        age = self.updates - self.born
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        numbers = self.transform.numbers(self.updates, age)
        if self._tail is not None:
            gradients = self._head.update(gradients, self.slots, self.parameters, numbers)
            self._tail.apply(gradients, self.slots, self.parameters, numbers, age)
        else:
            inputs: Numbers = {k: torch.tensor(v) for k, v in numbers.items()} if self._compiled else numbers
            self._transform_and_add(self.transform, gradients, self.slots, self.parameters, inputs)
        self.updates += 1
        return loss

    def learning_rate(self) -> float:
        """The factor that the next update will be multiplied by, sign removed: the product of all schedules."""
        rate = 1.0
        for name, value in self.transform.numbers(self.updates, self.updates - self.born).items():
            if name.endswith("factor"):
                rate *= abs(value)
        return rate

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        slots = {slot: dict(zip(self.names, tensors, strict=True)) for slot, tensors in self.slots.items()}
        return {"slots": slots, "updates": self.updates, "born": self.born}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        for slot, tensors in self.slots.items():
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(state_dict["slots"][slot][name])
        self.updates, self.born = state_dict["updates"], state_dict["born"]


def _transform_and_add(
    transform: Transform, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers
) -> None:
    torch._foreach_add_(parameters, transform.update(gradients, slots, parameters, numbers))
