"""Layout of a tensor's values on a rank.

Some weights are fused from slices, such as queries, keys and values, and each slice is divided among ranks. Such a
weight is stored in fused order: the first rank's parts of all slices, then the second rank's parts, and so on. An equal
split of the dim then gives each rank its parts. A tag on the tensor records the order. The order is undone wherever
values are stored by name.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from thrifty.core.dtensors import is_dtensor


@dataclass(frozen=True)
class TensorBox:
    """Part of a full tensor of shape `full` that starts at `offset` and has shape `shape`."""

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, other: "TensorBox") -> tuple[slice, ...]:
        """Return the slices that select this box in a tensor with the values of `other`."""
        places = zip(self.offset, other.offset, self.shape, strict=True)
        return tuple(slice(start - origin, start - origin + length) for start, origin, length in places)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select this box in the full tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class LocalShard:
    """Values on this rank: a box of the full tensor, and its position in the local tensor."""

    box: TensorBox
    place: tuple[slice, ...]


@dataclass(frozen=True)
class FusedOrder:
    """Stored order of a dim that is fused from slices of `sizes`, each divided among `ranks` ranks."""

    dim: int
    sizes: tuple[int, ...]
    ranks: int

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Contiguous parts in stored order, each as (start, length) in the whole tensor."""
        starts = (0, *accumulate(self.sizes))
        return tuple(
            (start + rank * (size // self.ranks), size // self.ranks)
            for rank in range(self.ranks)
            for start, size in zip(starts, self.sizes, strict=False)
        )

    @property
    def _places(self) -> Tensor:
        return torch.cat([torch.arange(start, start + length) for start, length in self.stretches])

    def to_stored(self, whole: Tensor) -> Tensor:
        """Return a whole tensor, rearranged to the stored order."""
        return whole.index_select(self.dim, self._places.to(whole.device))

    def whole(self, stored: Tensor) -> Tensor:
        """Return a tensor in stored order, rearranged to the order of the whole tensor."""
        return stored.index_select(self.dim, self._places.argsort().to(stored.device))

    def boxes(self, local_box: TensorBox) -> Iterator[tuple[TensorBox, TensorBox]]:
        """Yield a pair of boxes for each contiguous part of a stored box: in the whole tensor, and in stored order."""
        first, stop = local_box.offset[self.dim], local_box.offset[self.dim] + local_box.shape[self.dim]
        at = 0
        for start, length in self.stretches:
            begin, end = max(first, at), min(stop, at + length)
            if begin < end:
                there = _with(local_box, self.dim, start + begin - at, end - begin)
                yield there, _with(local_box, self.dim, begin, end - begin)
            at += length


def _with(box: TensorBox, dim: int, start: int, length: int) -> TensorBox:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = start, length
    return replace(box, offset=tuple(offset), shape=tuple(shape))


def order_of(tensor: Tensor) -> FusedOrder | None:
    """Return the fused order of a tensor, or None for the plain order."""
    return getattr(tensor, "fused_order", None)


def tag_order(tensor: Tensor, order: FusedOrder | None) -> Tensor:
    """Tag a tensor with its fused order, and return it."""
    if order is not None:
        tensor.fused_order = order  # type: ignore[attr-defined]
    return tensor


def tag_order_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Tag a tensor that belongs to a parameter, such as a moment, with the parameter's order. Return the tensor. Only a
    tensor that is sharded along the parameter's dim is tagged. The tensor may have one value for several adjacent rows
    or columns."""
    order = order_of(parameter)
    if order is None or not is_dtensor(tensor):
        return tensor
    same = tensor.ndim == parameter.ndim
    for dim in [order.dim] if same else range(tensor.ndim):
        lines, rest = divmod(sum(order.sizes), max(tensor.shape[dim], 1))
        alike = all(size % (lines * order.ranks) == 0 for size in order.sizes) if same else lines == 1
        if lines and not rest and alike and any(placement.is_shard(dim) for placement in tensor.placements):
            return tag_order(tensor, replace(order, dim=dim, sizes=tuple(size // lines for size in order.sizes)))
    return tensor


def record_orders(model: nn.Module) -> nn.Module:
    """Tag the model's parameters with their fused orders, from the dictionary `orders` of each module. Parameters that
    were replaced have lost their tags."""
    for module in model.modules():
        for name, order in getattr(module, "orders", {}).items():
            tag_order(getattr(module, name), order)
    return model


def local_shards(tensor: Tensor) -> list[LocalShard]:
    """Return this rank's values of a tensor: all values of a plain tensor, or the local shard of a DTensor."""
    full = tuple(tensor.shape)
    local_box = TensorBox(full, (0,) * len(full), full)
    if is_dtensor(tensor):
        (chunk,) = tensor.__create_chunk_list__()
        local_box = TensorBox(full, tuple(chunk.offsets), tuple(chunk.sizes))
    order = order_of(tensor)
    if order is None:
        return [LocalShard(local_box, local_box.within(local_box))]
    return [LocalShard(there, here.within(local_box)) for there, here in order.boxes(local_box)]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with shared memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor, with shared memory."""
    return [local_tensor(tensor) for tensor in tensors]
