"""Gradient transforms: small elements that turn gradients into updates, chained inside one torch optimizer.

An element is a set of functions on lists of tensors, with one tensor per parameter:

    scalars(step, age)                          scalars of this step (learning rates, bias corrections)
    init(names, parameters)                     initial state: slot name -> one tensor per parameter
    update(updates, slots, parameters, numbers) new updates; may overwrite the tensors of `updates`
    after_step(slots, parameters, numbers)      work after the parameters are updated, such as averaging them
    apply_constraints(slots, parameters)        masks and other constraints, after other code has set values

Scalars are computed outside `update`. `update` is therefore pure arithmetic, which torch.compile traces once for all
steps. State is changed in place. `reach` is the smallest set of values that an element must receive together
(`TransformScope`). If a sequence of elements equals a fused kernel of torch, `optim/fused_updates.py` calls the kernel.
The elements remain the reference. `chain` runs elements in order. `ParameterPartition` assigns each parameter to one of
several transforms.
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
"""Scalar that is nonzero in an update that changes masks. Promises about masks are checked after such an update."""
COMPENSATION = "compensation"
"""Slot for the rounding errors of weights. The masks of weights also apply to this slot."""


class StateAge(int):
    """Number of updates since the optimizer state was initialized. State that was added later, such as an average that
    a fork adds, has its own age in `younger`, under the path of its element. `base` is the age of all other state."""

    base: int
    younger: Mapping[str, int]

    def __new__(cls, age: int, younger: Mapping[str, int] | None = None, base: int | None = None) -> "StateAge":
        self = super().__new__(cls, age)
        self.base, self.younger = age if base is None else base, younger or {}
        return self

    def below(self, key: str) -> "StateAge":
        """Return the age for the inner transform with this key."""
        return StateAge(self.younger.get(key, self.base), without_prefix(key, self.younger), self.base)

    def less(self, updates: int) -> "StateAge":
        """Return the age minus the first `updates` updates."""
        if not updates:
            return self
        base = max(self.base - updates, 0)
        return StateAge(min(self, base), {key: min(age, base) for key, age in self.younger.items()}, base)


class TransformScope(IntEnum):
    """Smallest set of values that an element must receive together."""

    ROWS = auto()  # any rows of any parameter: elementwise arithmetic, or arithmetic within a row
    TENSOR = auto()  # a whole parameter: a norm, a matrix product
    ALL = auto()  # all parameters together: a global norm


class GradientTransform:
    """Identity transform, and base class of elements."""

    name = "identity"
    reach = TransformScope.ALL
    born = 0
    """Number of updates before the parameters of this element were added to the optimizer."""
    weights: frozenset[str] = frozenset()
    """Slots that hold weights, not moments of gradients. Techniques that quantize moments skip these slots."""
    squares: frozenset[str] = frozenset()
    """Slots of moments that are never negative."""

    def scalars(self, step: int, age: int) -> dict[str, float]:
        """Return the scalars of an update. `step` is the number of finished updates of the run. `age` is the number of
        updates since the state was initialized. Both start at 0."""
        return {}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return updates

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        """Do work after an update, such as averaging. `numbers` are the scalars of the finished update."""

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        """Return the values to evaluate and export in place of the trained parameters. None means the parameters.
        `numbers` are the scalars of the next update."""
        return None

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        """Apply the constraints of the slots, such as masks, to parameters and state. Parameters and state may have
        just been loaded. The method is idempotent."""

    def subset(self, indices: Sequence[int]) -> "GradientTransform":
        """Return the transform for the parameters at `indices`. An element that stores data per parameter outside its
        slots must override this method."""
        return self

    def slot_kind(self, slot: str) -> Content:
        """Return the content of a slot: weights or their averages, differences between weights, squares of gradients,
        or other moments."""
        if not changes_updates(self):
            return "weights"
        return "squares" if slot in self.squares else "moments"

    def owner(self, slot: str) -> str:
        """Return the path of the element that owns a slot, as keys below this transform; "" for this transform."""
        return ""

    def rate(self, numbers: Scalars) -> float:
        """Return the learning rate with which this element multiplies updates; 1 if the element has no learning
        rate."""
        return 1.0


def changes_updates(element: GradientTransform) -> bool:
    """Return True if an element changes updates, False if it only reads the parameters, as an average does."""
    return type(element).update is not GradientTransform.update


def with_prefix(prefix: str, mapping: Mapping[str, T]) -> dict[str, T]:
    """Return an inner transform's slots or scalars with `prefix.` before each key."""
    return {f"{prefix}.{key}": value for key, value in mapping.items()}


def without_prefix(prefix: str, mapping: Mapping[str, T]) -> dict[str, T]:
    """Return the items whose keys begin with `prefix.`, with this prefix removed."""
    return {key[len(prefix) + 1 :]: value for key, value in mapping.items() if key.startswith(prefix + ".")}


def inner_scalars(key: str, transform: GradientTransform, step: int, age: int) -> dict[str, float]:
    """Return the scalars of an inner transform, with `key` as prefix. Its steps and its age count from its birth."""
    whole = age if isinstance(age, StateAge) else StateAge(age)
    return with_prefix(key, transform.scalars(step - transform.born, whole.below(key).less(transform.born)))


def inner_owner(key: str, transform: GradientTransform, slot: str) -> str:
    """Return the owner of an inner transform's slot, as a path below the outer transform."""
    return f"{key}.{inner}" if (inner := transform.owner(slot)) else key


def group_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of plain tensors and DTensors as two groups, because torch's list operations refuse a mix of
    both."""
    plain: list[int] = []
    divided: list[int] = []
    for index, tensor in enumerate(tensors):
        (divided if is_dtensor(tensor) else plain).append(index)
    return [some for some in (plain, divided) if some]


class TransformChain(GradientTransform):
    name = "chain"
    site: Callable | None = None
    """Function that returns the chain's `UpdateLocation`. With None, the chain runs on the parameters' device."""

    def __init__(self, elements: Sequence[GradientTransform]):
        self.elements: dict[str, GradientTransform] = {}
        for element in elements:
            taken = sum(key.split("#")[0] == element.name for key in self.elements)
            self.elements[f"{element.name}#{taken + 1}" if taken else element.name] = element

    def part(self, keys: Sequence[str]) -> "TransformChain":
        """Return a chain of the elements with these keys. Their keys stay the same."""
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
    """Return the chain of these transforms. Inner chains are flattened: chain(chain(a, b), c) equals chain(a, b, c)."""
    flat: list[GradientTransform] = []
    for element in elements:
        if type(element) is TransformChain:
            flat.extend(element.elements.values())
        elif type(element) is not GradientTransform:
            flat.append(element)
    return TransformChain(flat)
