"""Gradient transforms behind one `torch.optim.Optimizer`, usable in anybody's own loop.

optimizer = TransformOptimizer(model.named_parameters(), chain(ScaleByAdam(), scale_by_learning_rate(1e-3)))
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.gradient_transform import (
    MASK_MOVE,
    Content,
    GradientTransform,
    Scalars,
    Slots,
    StateAge,
    TransformChain,
    chain,
)
from thrifty.optim.fused_updates import FusedUpdate
from thrifty.optim.update_plan import split_chain


class UpdateLocation:
    """Where an update is made and its state lives: here, with the parameters. A chain may bring a site of its own."""

    behind = False
    """Whether the parameters are an update behind the state."""

    def __init__(self, transform: TransformChain, names: Sequence[str], parameters: list[Tensor]):
        self.transform, self.parameters = transform, parameters
        self.state: Slots = transform.init(names, parameters)
        self.head, self.tail = split_chain(transform, parameters)
        self._compiled: Callable | None = None

    @property
    def slots(self) -> Slots:
        """All that a checkpoint must hold of it."""
        return self.state

    def slot_kind(self, slot: str) -> Content:
        return self.transform.slot_kind(slot)

    def owner(self, slot: str) -> str:
        """Return the element that a slot belongs to, see `GradientTransform.owner`."""
        return self.transform.owner(slot)

    def compile(self, **options: Any) -> None:
        if not isinstance(self.tail, FusedUpdate):
            self._compiled = torch.compile(_transform_and_add, **options)

    def update(self, gradients: list[Tensor], step: int, age: int) -> None:
        """Moves the parameters; `step` and `age` as in `GradientTransform.scalars`."""
        numbers = self.transform.scalars(step, age)
        if self._compiled is not None:
            inputs = {name: torch.tensor(value) for name, value in numbers.items()}
            self._compiled(self.transform, gradients, self.state, self.parameters, inputs)
        else:
            gradients = self.head.update(gradients, self.state, self.parameters, numbers)
            self.tail.apply(gradients, self.state, self.parameters, numbers)
        self.transform.after_step(self.state, self.parameters, numbers)

    def eval_weights(self, numbers: Scalars) -> list[Tensor] | None:
        return self.transform.eval_weights(self.state, self.parameters, numbers)

    def apply_constraints(self) -> None:
        self.transform.apply_constraints(self.state, self.parameters)


class TransformOptimizer(torch.optim.Optimizer):
    """Applies a transform to the gradients of named parameters and adds the result to them.

    Only parameters that require a gradient take part; a missing gradient counts as zero, and gradients may be
    overwritten. The state is `slots`, one tensor per parameter under each slot name, and two counters: `updates`
    finished, and `born`, the update at which the state was last fresh; `births` has the elements of the transform that
    were fresh later, by their paths (see `GradientTransform.owner`).
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], transform: GradientTransform):
        trained = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        super().__init__(list(trained.values()), {})
        self.names, self.parameters = list(trained), list(trained.values())
        self.transform = transform if type(transform) is TransformChain else chain(transform)
        self.site = (self.transform.site or UpdateLocation)(self.transform, self.names, self.parameters)
        self.updates, self.born = 0, 0
        self.births: dict[str, int] = {}

    @property
    def age(self) -> StateAge:
        return StateAge(self.updates - self.born, {path: self.updates - born for path, born in self.births.items()})

    @property
    def slots(self) -> Slots:
        return self.site.slots

    def compile(self, **options: Any) -> None:
        """Trace the arithmetic once with torch.compile, unless torch has a kernel for it; the numbers of each step go
        in as tensors."""
        self.site.compile(**options)

    def scalars(self) -> dict[str, float]:
        """The numbers of the update that comes next."""
        return self.transform.scalars(self.updates, self.age)

    def will_move_masks(self) -> bool:
        """Whether the update that comes next decides anew where there may be values, as when masks move."""
        return any(value for name, value in self.scalars().items() if name.rpartition(".")[2] == MASK_MOVE)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.site.update(gradients, self.updates, self.age)
        self.updates += 1
        return loss

    def learning_rate(self) -> float:
        """The factor that the next update will be multiplied by, sign removed: the product of all schedules."""
        return self.transform.rate(self.scalars())

    @torch.no_grad()
    def eval_weights(self) -> list[Tensor] | None:
        """The values to evaluate and to export where those are not the parameters being trained (an average of them),
        one for each of `names`; None where they are."""
        return self.site.eval_weights(self.scalars())

    @torch.no_grad()
    def apply_constraints(self) -> None:
        """Brings parameters and state in line with what the state demands (masks); whoever has filled either with
        values from elsewhere calls this."""
        self.site.apply_constraints()

    @contextmanager
    def use_eval_weights(self) -> Iterator[None]:
        """The parameters at the values to evaluate, for as long as the block lasts."""
        values = self.eval_weights()
        if values is None:
            yield
            return
        with torch.no_grad():
            trained = [parameter.clone() for parameter in self.parameters]
            _set(self.parameters, values)
        try:
            yield
        finally:
            _set(self.parameters, trained)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        slots = {slot: dict(zip(self.names, tensors, strict=True)) for slot, tensors in self.slots.items()}
        return {"slots": slots, "updates": self.updates, "born": self.born, "births": dict(self.births)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Raises UsageError, with nothing changed, for the state of another chain or of other parameters."""
        own, stored = self.state_dict()["slots"], state_dict.get("slots", {})
        places = [(slot, name, tensor) for slot, tensors in own.items() for name, tensor in tensors.items()]
        for slot, name, tensor in places:
            _check_fits(tensor, stored.get(slot, {}).get(name), f"{slot!r} of {name}")
        for slot, name, tensor in places:
            tensor.copy_(stored[slot][name])
        self.updates, self.born = state_dict["updates"], state_dict["born"]
        self.births = dict(state_dict.get("births", {}))


def _check_fits(tensor: Tensor, stored: Tensor | None, where: str) -> None:
    is_other = stored is not None and tensor.dtype.is_floating_point != stored.dtype.is_floating_point
    if stored is None or stored.shape != tensor.shape or is_other:
        how = "is missing" if stored is None else f"is {_described(stored)}, not {_described(tensor)}"
        fix = "load it into an optimizer of the same transforms and the same parameters"
        raise UsageError(f"this state is another optimizer's: {where} {how}", fix=fix)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)}".removeprefix("torch.")


@torch.no_grad()
def _set(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _transform_and_add(
    transform: GradientTransform, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars
) -> None:
    torch._foreach_add_(parameters, transform.update(gradients, slots, parameters, numbers))
