"""Weights under masks: what all sparse techniques share.

A technique says which weights are masked and how their masks start and move (`MaskPolicy`). `MaskedUpdate` keeps
everything else
under them: gradients before the rest of the update, updates after it, and every moment and average whenever a mask
moves. Gradients arrive dense, so that what grows connections can look at those that are not there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thrifty.core.dtensors import is_dtensor
from thrifty.core.errors import IntegrityError
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
"""Where the state of an optimizer has the masks: booleans in the shape of the weight, empty for what is not masked."""


@dataclass(frozen=True)
class MaskedLayer:
    """A masked weight as it is before a move: whole tensors of one shape, the same on every rank."""

    mask: Tensor
    weight: Tensor
    gradient: Tensor
    """Of the loss, dense: by the product of weight and mask."""


LayerReader = Callable[[str], MaskedLayer]


class MaskPolicy(Protocol):
    """What a sparse technique decides."""

    def masked(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
        """The names of the weights to be masked, out of all matrices that are trained."""
        ...

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The masks to start with, each like its parameter (divided as it is)."""
        ...

    def moves_at(self, step: int) -> bool:
        """Whether masks move in the update of this step."""
        ...

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        """The new mask of each name; `layer` gathers what is there now, on all ranks together and in the same order.
        A name that is left out keeps its mask."""
        ...

    @property
    def replaces_update(self) -> bool:
        """Whether a step that moves masks makes no other update."""
        ...


class MaskedUpdate(GradientTransform):
    """The rest of the update under masks."""

    name = "masks"

    def __init__(self, rest: GradientTransform, masking: MaskPolicy):
        self.rest, self.masking = rest, masking
        self.names: dict[int, str] = {}

    def scalars(self, step: int, age: int) -> dict[str, float]:
        # the step counted from 1, so that 0 is a step in which masks stay
        move = float(step + 1) if self.masking.moves_at(step) else 0.0
        return {MASK_MOVE: move, **inner_scalars("rest", self.rest, step, age)}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        named = dict(zip(names, parameters, strict=True))
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
        # products of whole matrices, as Muon's, give places outside the mask updates too, which are rounded with them
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
        """Lets the masks move, and everything else follow them."""
        masks, index = slots["mask"], {name: i for i, name in self.names.items()}

        def layer(name: str) -> MaskedLayer:
            # decided on whole tensors, so that every rank of a sharded run decides the same
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
    """The mask that a parameter is under, changed in place whenever it moves (`mask._version` tells); None for what is
    not masked, for a parameter in pieces, and where the optimizer keeps copies of parameters elsewhere."""
    return getattr(parameter, "under_mask", None)


def check_masks(technique: str, state: TrainState, allowed: Mapping[str, int]) -> None:
    """Raises IntegrityError where a weight has more values, or its mask more places, than `allowed`, or where anything
    of the optimizer that has a weight's shape, the weight itself or the values that are judged, is not zero outside its
    mask."""
    assert state.model is not None and state.optimizer is not None
    optimizer, masks = state.optimizer, masks_in(state)
    parameters = dict(state.model.named_parameters())
    if optimizer.site.behind:  # what a mask has just taken out is still there until the update is
        parameters |= dict(zip(optimizer.names, optimizer.site.copies, strict=True))
    for name, most in allowed.items():
        nonzero = int(full_value(parameters[name]).count_nonzero())
        if nonzero > most:
            raise IntegrityError(f"{technique}: {name} has {nonzero} non-zero weights, at most {most} promised")
        # a place that has just been grown is zero until the next update
        if name in masks and (places := int(full_value(masks[name]).sum())) > most:
            raise IntegrityError(f"{technique}: the mask of {name} keeps {places} weights, at most {most} promised")
    kept = {slot: tensors for slot, tensors in optimizer.slots.items() if not slot.endswith(SLOT)}
    if not optimizer.site.behind:
        kept["the value"] = optimizer.parameters
        if (judged := optimizer.eval_weights()) is not None:
            kept["the judged value"] = judged
    for slot, tensors in kept.items():
        for name, parameter, tensor in zip(optimizer.names, optimizer.parameters, tensors, strict=True):
            mask, order = masks.get(name), order_of(parameter)
            if mask is None or tensor.shape != mask.shape:
                continue
            closed = ~full_value(mask, order).to(tensor.device)  # which may be offloaded
            outside = int((full_value(tensor, order) != 0).logical_and_(closed).sum())
            if outside:
                raise IntegrityError(f"{technique}: {slot} of {name} has {outside} values outside the mask")


def masks_in(state: TrainState) -> dict[str, Tensor]:
    """The masks of a state by the names of their weights."""
    assert state.optimizer is not None
    for slot, tensors in state.optimizer.slots.items():
        if slot.endswith(SLOT):
            return {name: mask for name, mask in zip(state.optimizer.names, tensors, strict=True) if mask.numel()}
    return {}
