"""Gradient transforms: small elements that turn gradients into updates, chained behind one torch optimizer.

An element is a function of lists of tensors, one entry per parameter:

    scalars(step, age)                          the numbers of this step (rates, bias corrections)
    init(names, parameters)                     its state: slot name -> one tensor per parameter
    update(updates, slots, parameters, numbers) what it does; it owns `updates` and may overwrite them
    after_step(slots, parameters, numbers)      what it does once the parameters have moved, such as averaging them
    apply_constraints(slots, parameters)        what its slots demand of the parameters, after others have set values

Numbers are computed apart so that `update` is pure arithmetic that torch.compile can trace once for all steps. State is
changed in place. How far an element looks (`reach`) says in what pieces it may be run; where a whole run of elements
is one of torch's fused kernels, `optim/fused_updates.py` calls that, and the elements remain the meaning and the
reference. `chain` runs elements in order, `ParameterPartition` gives each parameter to exactly one of several.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Literal, TypeVar

from torch import Tensor

from thrifty.core.dtensors import is_dtensor

Slots = dict[str, list[Tensor]]
Scalars = Mapping[str, float | Tensor]
Rule = Callable[[str, Tensor], bool]
Content = Literal["weights", "differences", "squares", "moments"]
T = TypeVar("T")
MASK_MOVE = "move"
"""A number of this name is not 0 in an update that decides anew where there may be values, after which whoever promised
something of them is asked."""
COMPENSATION = "compensation"
"""The slot of what rounding has cut off weights, which masks go for as they do for the weights."""


class StateAge(int):
    """Updates since the state was last fresh. What was fresh later, such as an average that a fork adds, has an age of
    its own: `younger`, by the path of keys of an element. `base` is that of everything else below a path."""

    base: int
    younger: Mapping[str, int]

    def __new__(cls, age: int, younger: Mapping[str, int] | None = None, base: int | None = None) -> "StateAge":
        self = super().__new__(cls, age)
        self.base, self.younger = age if base is None else base, younger or {}
        return self

    def below(self, key: str) -> "StateAge":
        """The age of an inner transform."""
        return StateAge(self.younger.get(key, self.base), without_prefix(key, self.younger), self.base)

    def less(self, updates: int) -> "StateAge":
        """With so many of the first updates not counted."""
        base = self.base - updates
        return StateAge(min(self, base), {key: min(age, base) for key, age in self.younger.items()}, base)


class TransformScope(IntEnum):
    """What an element must see at once to be right."""

    ROWS = auto()  # any rows of any parameter: arithmetic on each number apart, or within its row
    TENSOR = auto()  # a whole parameter: a norm, a matrix product
    ALL = auto()  # all parameters together: a global norm


class GradientTransform:
    """The identity, and what an element may override."""

    name = "identity"
    reach = TransformScope.ALL
    weights: frozenset[str] = frozenset()
    """Slots that hold weights, not moments of gradients: whoever stores moments in fewer bits leaves them alone."""
    squares: frozenset[str] = frozenset()
    """Slots of moments that are never negative."""

    def scalars(self, step: int, age: int) -> dict[str, float]:
        """`step` counts the run's finished updates, `age` those since the state was last fresh; both start at 0."""
        return {}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return updates

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        """Called with the parameters as they are after the update, and the numbers of that update."""

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        """The values to evaluate and to export in place of the parameters being trained; None for those themselves.
        `numbers` are the scalars of the next update."""
        return None

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        """Brings parameters and state, which may have been filled with values from elsewhere, in line with what the
        slots demand, such as masks. Doing it twice does what doing it once does."""

    def subset(self, indices: Sequence[int]) -> "GradientTransform":
        """This transform for some of the parameters that it was initialised with. An element that keeps something per
        parameter outside its slots must override it."""
        return self

    def slot_kind(self, slot: str) -> Content:
        """Return the content of a slot: weights or their averages, differences between weights, squares of gradients,
        or other moments."""
        if not changes_updates(self):
            return "weights"
        return "squares" if slot in self.squares else "moments"

    def owner(self, slot: str) -> str:
        """Return the path of keys, below this transform, of the element that owns a slot; "" for this transform."""
        return ""

    def rate(self, numbers: Scalars) -> float:
        """By how much this element multiplies what passes through it, where that is a learning rate."""
        return 1.0


def changes_updates(element: GradientTransform) -> bool:
    """Whether an element changes updates at all; one that only follows the parameters does not."""
    return type(element).update is not GradientTransform.update


def with_prefix(prefix: str, mapping: Mapping[str, T]) -> dict[str, T]:
    """Slots or numbers of an inner transform as entries of an outer one's, below `prefix.`."""
    return {f"{prefix}.{key}": value for key, value in mapping.items()}


def without_prefix(prefix: str, mapping: Mapping[str, T]) -> dict[str, T]:
    """The inner transform's entries again."""
    return {key[len(prefix) + 1 :]: value for key, value in mapping.items() if key.startswith(prefix + ".")}


def inner_scalars(key: str, transform: GradientTransform, step: int, age: int) -> dict[str, float]:
    """The numbers of an inner transform as entries of an outer one's."""
    whole = age if isinstance(age, StateAge) else StateAge(age)
    return with_prefix(key, transform.scalars(step, whole.below(key)))


def inner_owner(key: str, transform: GradientTransform, slot: str) -> str:
    """Return the owner of an inner transform's slot, as a path below the outer transform."""
    return f"{key}.{inner}" if (inner := transform.owner(slot)) else key


def group_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Plain and divided tensors apart, by index: torch's operations on lists take no mixed ones."""
    plain: list[int] = []
    divided: list[int] = []
    for index, tensor in enumerate(tensors):
        (divided if is_dtensor(tensor) else plain).append(index)
    return [some for some in (plain, divided) if some]


class TransformChain(GradientTransform):
    name = "chain"
    site: Callable | None = None
    """Makes the `UpdateLocation` where a whole chain is run; None is with the parameters."""

    def __init__(self, elements: Sequence[GradientTransform]):
        self.elements: dict[str, GradientTransform] = {}
        for element in elements:
            taken = sum(key.split("#")[0] == element.name for key in self.elements)
            self.elements[f"{element.name}#{taken + 1}" if taken else element.name] = element

    def part(self, keys: Sequence[str]) -> "TransformChain":
        """Some of the elements, under the keys they have here."""
        some = TransformChain([])
        some.elements = {key: self.elements[key] for key in keys}
        return some

    @property
    def reach(self) -> TransformScope:  # type: ignore[override]
        return max((element.reach for element in self.elements.values()), default=TransformScope.ROWS)

    def scalars(self, step: int, age: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for key, element in self.elements.items():
            numbers |= inner_scalars(key, element, step, age)
        return numbers

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {
            slot: tensors
            for key, element in self.elements.items()
            for slot, tensors in with_prefix(key, element.init(names, parameters)).items()
        }

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        kinds = group_by_kind(parameters)
        for key, element in self.elements.items():
            own, scalars = without_prefix(key, slots), without_prefix(key, numbers)
            if len(kinds) < 2 or element.reach is TransformScope.ALL:
                updates = element.update(updates, own, parameters, scalars)
                continue
            updates = list(updates)
            for some in kinds:
                state = {slot: [tensors[i] for i in some] for slot, tensors in own.items()}
                gradients, moved = [updates[i] for i in some], [parameters[i] for i in some]
                for i, update in zip(some, element.subset(some).update(gradients, state, moved, scalars), strict=True):
                    updates[i] = update
        return updates

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        for key, element in self.elements.items():
            element.after_step(without_prefix(key, slots), parameters, without_prefix(key, numbers))

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        weights = None
        for key, element in self.elements.items():
            values = element.eval_weights(without_prefix(key, slots), parameters, without_prefix(key, numbers))
            weights = weights if values is None else values
        return weights

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        for key, element in self.elements.items():
            element.apply_constraints(without_prefix(key, slots), parameters)

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        some = TransformChain([])
        some.elements = {key: element.subset(indices) for key, element in self.elements.items()}
        return some

    def slot_kind(self, slot: str) -> Content:
        key, _, own = slot.partition(".")
        return self.elements[key].slot_kind(own)

    def owner(self, slot: str) -> str:
        key, _, own = slot.partition(".")
        return inner_owner(key, self.elements[key], own)

    def rate(self, numbers: Scalars) -> float:
        rate = 1.0
        for key, element in self.elements.items():
            rate *= element.rate(without_prefix(key, numbers))
        return rate


def chain(*elements: GradientTransform) -> TransformChain:
    """One transform after the other; chains inside are opened, so that chain(chain(a, b), c) is chain(a, b, c)."""
    flat: list[GradientTransform] = []
    for element in elements:
        if type(element) is TransformChain:
            flat.extend(element.elements.values())
        elif type(element) is not GradientTransform:
            flat.append(element)
    return TransformChain(flat)
