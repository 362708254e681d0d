"""Partition of parameters among gradient transforms: each parameter is updated by exactly one transform."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.gradient_transform import (
    Content,
    GradientTransform,
    Rule,
    Scalars,
    Slots,
    TransformScope,
    chain,
    inner_owner,
    inner_scalars,
    without_prefix,
)


class ParameterPartition(GradientTransform):
    """Transform that applies to each parameter the transform of its first matching rule. A parameter without a matching
    rule is an error.
    """

    name = "partition"

    def __init__(self, rules: Iterable[tuple[str, Rule, GradientTransform]]):
        self.rules = {label: (rule, transform) for label, rule, transform in rules}
        self.members: dict[str, list[int]] = {}

    @property
    def reach(self) -> TransformScope:  # type: ignore[override]
        return max(transform.reach for _, transform in self.rules.values())

    def label_of(self, name: str, parameter: Tensor) -> str:
        """Return the label of the first rule that matches a parameter. Raise UsageError if no rule matches."""
        for label, (rule, _) in self.rules.items():
            if rule(name, parameter):
                return label
        raise UsageError(
            f"partition: no rule matches parameter {name!r} of shape {tuple(parameter.shape)}",
            fix='add a last rule ("rest", lambda name, parameter: True, …)',
        )

    def labels(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Sequence[str]:
        """Return the label of each parameter."""
        return [self.label_of(*pair) for pair in zip(names, parameters, strict=True)]

    def mapped(self, change: Callable[[GradientTransform], GradientTransform]) -> "ParameterPartition":
        """Return the same partition with the chain of `change(transform)` in place of each rule's transform."""
        changed = copy(self)
        changed.rules = {label: (rule, chain(change(transform))) for label, (rule, transform) in self.rules.items()}
        return changed

    def scalars(self, step: int, age: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for label, (_, transform) in self.rules.items():
            numbers |= inner_scalars(label, transform, step, age)
        return numbers

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.members = {label: [] for label in self.rules}
        for index, label in enumerate(self.labels(names, parameters)):
            self.members[label].append(index)
        slots: Slots = {}
        for label, (_, transform) in self.rules.items():
            own = self.members[label]
            inner = transform.init([names[i] for i in own], [parameters[i] for i in own])
            for slot, tensors in inner.items():
                # every slot has one tensor per parameter; for parameters of other rules the tensor is empty
                filled = [parameter.new_empty(0) for parameter in parameters]
                for index, tensor in zip(own, tensors, strict=True):
                    filled[index] = tensor
                slots[f"{label}.{slot}"] = filled
        return slots

    def _members(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> Iterator[Any]:
        """Yield the parameter indices of each rule, its transform, and its part of slots, parameters and numbers."""
        for label, (_, transform) in self.rules.items():
            own = self.members[label]
            state = {slot: [tensors[i] for i in own] for slot, tensors in without_prefix(label, slots).items()}
            yield own, transform, state, [parameters[i] for i in own], without_prefix(label, numbers)

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        result = list(updates)
        for own, transform, *state in self._members(slots, parameters, numbers):
            changed = transform.update([updates[i] for i in own], *state) if own else []
            for index, update in zip(own, changed, strict=True):
                result[index] = update
        return result

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        for _, transform, *state in self._members(slots, parameters, numbers):
            transform.after_step(*state)

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        result, changed = list(parameters), False
        for own, transform, *state in self._members(slots, parameters, numbers):
            if (values := transform.eval_weights(*state)) is not None:
                changed = True
                for index, value in zip(own, values, strict=True):
                    result[index] = value
        return result if changed else None

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        for _, transform, state, some, _ in self._members(slots, parameters, {}):
            transform.apply_constraints(state, some)

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        some = copy(self)
        some.rules, some.members = {}, {}
        for label, (rule, transform) in self.rules.items():
            places = [self.members[label].index(i) for i in indices if i in self.members[label]]
            some.rules[label] = (rule, transform.subset(places))
            some.members[label] = [place for place, i in enumerate(indices) if i in self.members[label]]
        return some

    def slot_kind(self, slot: str) -> Content:
        label, _, own = slot.partition(".")
        return self.rules[label][1].slot_kind(own)

    def owner(self, slot: str) -> str:
        label, _, own = slot.partition(".")
        return inner_owner(label, self.rules[label][1], own)

    def rate(self, numbers: Scalars) -> float:
        """Return the learning rate of the first rule's transform, the main optimizer."""
        label, (_, transform) = next(iter(self.rules.items()))
        return transform.rate(without_prefix(label, numbers))


def partition(*rules: tuple[str, Rule, GradientTransform]) -> ParameterPartition:
    """Return a partition: `partition(("matrices", is_matrix, chain(…)), ("rest", lambda n, p: True, chain(…)))`."""
    return ParameterPartition(rules)
