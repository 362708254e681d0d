"""A `torch.optim.Optimizer` that runs gradient transforms and works in any training loop.

optimizer = TransformOptimizer(model.named_parameters(), chain(ScaleByAdam(), scale_by_learning_rate(1e-3)))
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Location of an update and its state: the parameters' device, or the location that the chain's `site` defines."""

    behind = False
    """True if the parameters are one update older than the state."""

    def __init__(self, transform: TransformChain, names: Sequence[str], parameters: list[Tensor]):
        self.transform = transform
        self.state: Slots = transform.init(names, parameters)
        self.prepare(parameters)
        self._compiled: Callable | None = None

    def prepare(self, parameters: list[Tensor]) -> None:
        """Split the chain into head and tail. Call it again if settings of the chain change."""
        self.head, self.tail = split_chain(self.transform, parameters)

    def join(self) -> None:
        """Wait for an update that is still being computed."""

    @property
    def slots(self) -> Slots:
        """State that a checkpoint must store."""
        return self.state

    def slot_kind(self, slot: str) -> Content:
        return self.transform.slot_kind(slot)

    def owner(self, slot: str) -> str:
        """Return the path of the element that owns a slot, see `GradientTransform.owner`."""
        return self.transform.owner(slot)

    def compile(self, **options: Any) -> None:
        if not isinstance(self.tail, FusedUpdate):
            self._compiled = torch.compile(_transform_and_add, **options)

    def update(self, gradients: list[Tensor], parameters: list[Tensor], step: int, age: int) -> None:
        """Update the parameters. `step` and `age` are defined in `GradientTransform.scalars`."""
        numbers = self.transform.scalars(step, age)
        if self._compiled is not None:
            inputs = {name: torch.tensor(value) for name, value in numbers.items()}
            self._compiled(self.transform, gradients, self.state, parameters, inputs)
        else:
            gradients = self.head.update(gradients, self.state, parameters, numbers)
            self.tail.apply(gradients, self.state, parameters, numbers)
        self.transform.after_step(self.state, parameters, numbers)

    def eval_weights(self, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        return self.transform.eval_weights(self.state, parameters, numbers)

    def apply_constraints(self, parameters: list[Tensor]) -> None:
        self.transform.apply_constraints(self.state, parameters)


class TransformOptimizer(torch.optim.Optimizer):
    """Optimizer that applies a transform to the gradients of named parameters, and adds the result to the parameters.

    Only parameters that require a gradient are updated. A missing gradient counts as zero, and gradients may be
    overwritten. The state consists of `slots` and counters. Each slot contains one tensor per parameter. `updates`
    counts finished updates. `born` is the update at which the state was last initialized. `births` is the same number
    for each element that was initialized later, by its path (see `GradientTransform.owner`).
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], transform: GradientTransform):
        super().__init__([(name, each) for name, each in named_parameters if each.requires_grad], {})
        self.updates, self.born = 0, 0
        self.births: dict[str, int] = {}
        self.unreached: set[str] = set()
        self._is_first = True
        self.transform = transform if type(transform) is TransformChain else chain(transform)
        self.site = self.located(self.names, self.parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False):
            if parameter.is_complex():
                raise UsageError(
                    f"the parameter {name!r} is complex ({parameter.dtype}); updates support only real parameters",
                    fix="make torch.view_as_real(weight) the parameter, and call torch.view_as_complex on it in "
                    "forward",
                )

    def located(self, names: Sequence[str], parameters: list[Tensor]) -> UpdateLocation:
        return (self.transform.site or UpdateLocation)(self.transform, names, parameters)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def names(self) -> list[str]:
        return [name for group in self.param_groups for name in group["param_names"]]

    @property
    def age(self) -> StateAge:
        return StateAge(self.updates - self.born, {path: self.updates - born for path, born in self.births.items()})

    @property
    def slots(self) -> Slots:
        return self.site.slots

    def compile(self, **options: Any) -> None:
        """Trace the update once with torch.compile, unless torch has a fused kernel for it.

        The scalars of each step are passed as tensors.
        """
        self.site.compile(**options)

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the next update."""
        return self.transform.scalars(self.updates, self.age)

    def will_move_masks(self) -> bool:
        """Return True if the next update moves masks, so that other weights may become nonzero."""
        return any(value for name, value in self.scalars().items() if name.rpartition(".")[2] == MASK_MOVE)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.make_update()
        return loss

    def make_update(self) -> None:
        parameters = self.parameters
        if self._is_first or self.unreached:
            idle = {name for name, each in zip(self.names, parameters, strict=True) if each.grad is None}
            self.unreached, self._is_first = idle if self._is_first else self.unreached & idle, False
        gradients = dense_gradients(self.names, parameters)
        self.site.update(gradients, parameters, self.updates, self.age)
        self.updates += 1

    def learning_rate(self) -> float:
        """Return the learning rate of the next update: the absolute product of all schedules."""
        numbers = self.scalars()
        return self.transform.rate(numbers)

    @torch.no_grad()
    def eval_weights(self) -> list[Tensor] | None:
        """Return the weights for evaluation and export, one tensor per entry of `names`, if they differ from the
        trained parameters (for example an EMA). Return None if they do not differ.
        """
        return self.site.eval_weights(self.parameters, self.scalars())

    @torch.no_grad()
    def apply_constraints(self) -> None:
        """Apply the constraints of the state (masks). Call it after loading values into parameters or state."""
        self.site.apply_constraints(self.parameters)

    @contextmanager
    def use_eval_weights(self) -> Iterator[None]:
        """Use the evaluation weights as parameters inside the `with` block."""
        values, parameters = self.eval_weights(), self.parameters
        if values is None:
            yield
            return
        with torch.no_grad():
            trained = [parameter.clone() for parameter in parameters]
            _set(parameters, values)
        try:
            yield
        finally:
            _set(parameters, trained)


def dense_gradients(names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of named parameters, zeros where there is none. Raise UsageError for a sparse gradient."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UsageError(
                f"the gradient of {name!r} is sparse; updates support only dense gradients",
                fix="build the layer with sparse=False: nn.Embedding(…, sparse=False)",
            )
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]


@torch.no_grad()
def _set(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _transform_and_add(
    transform: GradientTransform, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars
) -> None:
    torch._foreach_add_(parameters, transform.update(gradients, slots, parameters, numbers))
