"""Masked weights: the base of all sparse techniques.

A technique selects the masked weights, the initial masks and the mask moves (`MaskPolicy`). `MaskedUpdate` applies
masks to gradients before the rest of the update, and to updates after it. If a mask moves, `MaskedUpdate` also applies
it to every moment and average. Gradients are dense, so growth criteria can use the gradients of inactive connections.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thrifty.core.dtensors import is_dtensor
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.gradient_transform import (
    COMPENSATION,
    MASK_MOVE,
    Content,
    GradientTransform,
    Scalars,
    Slots,
    inner_owner,
    inner_scalars,
    with_prefix,
    without_prefix,
)
from thrifty.core.shard_layout import order_of
from thrifty.core.state import TrainState, fill_tensor, full_value
from thrifty.optim.mask_selection import masked_shapes

SLOT = "masks.mask"
"""Slot name of the masks in the optimizer's state. A mask is a boolean tensor in the shape of the weight, or empty."""


@dataclass(frozen=True)
class MaskedLayer:
    """A masked weight before a mask move. All fields are whole tensors of the same shape, with equal values on every
    rank."""

    mask: Tensor
    weight: Tensor
    gradient: Tensor
    """Dense gradient of the loss with respect to weight · mask."""


LayerReader = Callable[[str], MaskedLayer]


@runtime_checkable
class MaskPolicy(Protocol):
    """Decisions of a sparse technique: masked weights, initial masks, mask moves."""

    def masked(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
        """Return the names of the weights to mask. `shapes` contains all trained matrices."""
        ...

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the initial masks, each sharded like its parameter."""
        ...

    def moves_at(self, step: int) -> bool:
        """Return True if masks move in the update of `step`."""
        ...

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, new mask) pairs. A name that is not yielded keeps its mask.

        `layer(name)` gathers the current tensors of a weight. All ranks must call it in the same order.
        """
        ...

    @property
    def replaces_update(self) -> bool:
        """True if a step that moves masks makes no other update."""
        ...


class MaskedUpdate(GradientTransform):
    """Transform that applies masks around the rest of the update."""

    name = "masks"

    def __init__(self, rest: GradientTransform, masking: MaskPolicy):
        self.rest, self.masking = rest, masking
        self.names: dict[int, str] = {}

    def scalars(self, step: int, age: int) -> dict[str, float]:
        # step + 1, or 0 if no mask moves
        move = float(step + 1) if self.masking.moves_at(step) else 0.0
        return {MASK_MOVE: move, **inner_scalars("rest", self.rest, step, age)}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        named = dict(zip(names, parameters, strict=True))
        if len(named) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise UsageError(
                f"two parameters of the optimizer have the name {twice!r}, and masks are chosen by name",
                fix=f"pass different names, such as ('critic.{twice}', weight)",
            )
        wanted = set(self.masking.masked(masked_shapes(named)))
        self.names = {i: name for i, name in enumerate(names) if name in wanted}
        masks = [parameter.new_empty(0, dtype=torch.bool) for parameter in parameters]
        first = self.masking.initial_masks({name: named[name] for name in self.names.values()})
        for i, name in self.names.items():
            masks[i] = first[name]
            if not is_dtensor(parameters[i]):
                parameters[i].under_mask = masks[i]  # type: ignore[attr-defined]
        self._apply([parameter.detach() for parameter in parameters], masks)
        return {"mask": masks, **with_prefix("rest", self.rest.init(names, parameters))}

    def apply_constraints(self, slots: Slots, parameters: list[Tensor]) -> None:
        self._apply(parameters, slots["mask"])
        for tensors in without_prefix("rest", slots).values():
            self._apply(tensors, slots["mask"])
        self.rest.apply_constraints(without_prefix("rest", slots), parameters)

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        if numbers[MASK_MOVE]:
            self.move(updates, slots, parameters, int(numbers[MASK_MOVE]) - 1)
            if self.masking.replaces_update:
                return [torch.zeros_like(parameter) for parameter in parameters]
        own = without_prefix("rest", slots)
        self._apply(updates, slots["mask"])
        updates = self.rest.update(updates, own, parameters, without_prefix("rest", numbers))
        # matmuls of whole matrices, as in Muon, also update masked positions, and compensations of rounding
        for tensors in (updates, *(own[slot] for slot in own if slot.endswith(COMPENSATION))):
            self._apply(tensors, slots["mask"])
        return updates

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        self.rest.after_step(without_prefix("rest", slots), parameters, without_prefix("rest", numbers))

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        return self.rest.eval_weights(without_prefix("rest", slots), parameters, without_prefix("rest", numbers))

    def slot_kind(self, slot: str) -> Content:
        kind, _, own = slot.partition(".")
        return self.rest.slot_kind(own) if kind == "rest" else "moments"

    def owner(self, slot: str) -> str:
        kind, _, own = slot.partition(".")
        return inner_owner(kind, self.rest, own) if kind == "rest" else ""

    def rate(self, numbers: Scalars) -> float:
        return self.rest.rate(without_prefix("rest", numbers))

    def move(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], step: int) -> None:
        """Move the masks, and apply the new masks to parameters and state."""
        masks, index = slots["mask"], {name: i for i, name in self.names.items()}

        def layer(name: str) -> MaskedLayer:
            # policies receive whole tensors, so that all ranks of a sharded run make the same decision
            i = index[name]
            order = order_of(parameters[i])
            return MaskedLayer(*(full_value(tensor[i], order) for tensor in (masks, parameters, gradients)))

        for name, mask in self.masking.next_masks(list(index), layer, step):
            fill_tensor(masks[index[name]], mask)
        self.apply_constraints(slots, parameters)

    def _apply(self, tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
        for i in self.names:
            if tensors[i].shape == masks[i].shape:
                tensors[i].mul_(masks[i].to(tensors[i].device))


def mask_of(parameter: Tensor) -> Tensor | None:
    """Return the mask of a parameter, in its shape. The mask changes in place; `mask._version` counts the changes.

    Return None if the parameter is not masked or is sharded, or if the optimizer updates offloaded copies.
    """
    return getattr(parameter, "under_mask", None)


def check_masks(technique: str, state: TrainState, allowed: Mapping[str, int]) -> None:
    """Raise IntegrityError if a state violates its masks.

    A weight may have at most `allowed` nonzero values, and its mask at most `allowed` True positions. The weight, its
    evaluation weight, and each slot with the weight's shape must be zero outside the mask.
    """
    assert state.model is not None and state.optimizer is not None
    optimizer, masks = state.optimizer, masks_in(state)
    parameters = dict(state.model.named_parameters())
    if optimizer.site.behind:  # delayed parameters still contain weights that the mask has removed in this step
        parameters |= dict(zip(optimizer.names, optimizer.site.copies, strict=True))
    for name, most in allowed.items():
        nonzero = int(full_value(parameters[name]).count_nonzero())
        if nonzero > most:
            raise IntegrityError(f"{technique}: {name} has {nonzero} nonzero weights, but at most {most} are allowed")
        # a connection that was grown in this step is zero until the next update
        if name in masks and (places := int(full_value(masks[name]).sum())) > most:
            raise IntegrityError(
                f"{technique}: the mask of {name} keeps {places} weights, but at most {most} are allowed"
            )
    checked = {slot: tensors for slot, tensors in optimizer.slots.items() if not slot.endswith(SLOT)}
    if not optimizer.site.behind:
        checked["the weight"] = optimizer.parameters
        if (eval_weights := optimizer.eval_weights()) is not None:
            checked["the evaluation weight"] = eval_weights
    for slot, tensors in checked.items():
        for name, parameter, tensor in zip(optimizer.names, optimizer.parameters, tensors, strict=True):
            mask, order = masks.get(name), order_of(parameter)
            if mask is None or tensor.shape != mask.shape:
                continue
            closed = ~full_value(mask, order).to(tensor.device)  # the tensor may be offloaded
            outside = int((full_value(tensor, order) != 0).logical_and_(closed).sum())
            if outside:
                raise IntegrityError(f"{technique}: {slot} of {name} has {outside} values outside the mask")


def masks_in(state: TrainState) -> dict[str, Tensor]:
    """Return the masks of a state by the names of their weights."""
    assert state.optimizer is not None
    for slot, tensors in state.optimizer.slots.items():
        if slot.endswith(SLOT):
            return {name: mask for name, mask in zip(state.optimizer.names, tensors, strict=True) if mask.numel()}
    return {}
