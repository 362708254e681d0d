"""The formats that moments of gradients are stored in between steps, and the way from one to another.

In 8 bits a moment is two slots: its codes under its own name, and their scales beside them. A row of codes is divided
into as many blocks as it has scales, none of which lies on two ranks; so a row that is divided among ranks is a row of
codes as any other, and only who wants another number of blocks opens it and closes it again.
"""

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from thrifty.core.dtensors import dtensor_of_local, is_dtensor
from thrifty.core.gradient_transform import Content
from thrifty.core.shard_layout import local_shards, order_of
from thrifty.core.state import fill_tensor
from thrifty.kernels.blockwise_quantization import BLOCK, CodeBook, block_count, code_book, dequantize, quantize
from thrifty.kernels.stochastic_rounding import round_to_bfloat16

SHORTEST_ROW = 16
"""Blocks of fewer numbers keep float32: a scale would weigh as much as their codes save."""
SCALES = ".scales"
"""What the name of a slot of scales ends with."""

Seed = int | Tensor | None
"""Of the step, for rounding by chance; None rounds to the nearest."""
SlotKind = Callable[[str], Content]


class StateFormat(Protocol):
    parts: Sequence[str]
    """A moment's slots, as endings of its name."""

    def blocks(self, moment: Tensor, parameter: Tensor) -> int:
        """Return into how many blocks this rank's part of each row is divided; 0 for a moment that keeps float32."""
        ...

    def close(self, moment: Tensor, never_negative: bool, seed: Seed, blocks: int) -> tuple[Tensor, ...]: ...

    def open(self, parts: Sequence[Tensor], never_negative: bool) -> Tensor: ...


class Bfloat16Format:
    parts = ("",)

    def blocks(self, moment: Tensor, parameter: Tensor) -> int:
        return 1

    def close(self, moment: Tensor, never_negative: bool, seed: Seed, blocks: int) -> tuple[Tensor, ...]:
        return (moment.bfloat16() if seed is None else round_to_bfloat16(moment, seed),)

    def open(self, parts: Sequence[Tensor], never_negative: bool) -> Tensor:
        return parts[0].float()


class Int8Format:
    parts = ("", SCALES)

    def __init__(self) -> None:
        self.books: dict[tuple[bool, torch.device], CodeBook] = {}

    def blocks(self, moment: Tensor, parameter: Tensor) -> int:
        columns = local_tensor(moment)[:1].numel()
        if not is_dtensor(moment) or all(p.is_replicate() or p.is_shard(0) for p in moment.placements):
            return block_count(columns)
        if moment.ndim != 2 or not all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in moment.placements):
            return 0
        ranks = prod(size for size, p in zip(moment.device_mesh.shape, moment.placements, strict=True) if p.is_shard(1))
        order = order_of(parameter)
        slices = order.sizes if order and order.dim == 1 else moment.shape[1:]
        if any(size % ranks for size in slices):
            return 0
        together = gcd(*(size // ranks for size in slices))
        size = next(size for size in range(min(together, BLOCK), 0, -1) if together % size == 0)
        return columns // size if size >= SHORTEST_ROW else 0

    def close(self, moment: Tensor, never_negative: bool, seed: Seed, blocks: int) -> tuple[Tensor, ...]:
        return quantize(moment, self._book(moment, never_negative), seed, blocks)

    def open(self, parts: Sequence[Tensor], never_negative: bool) -> Tensor:
        return dequantize(*parts, self._book(parts[0], never_negative))

    def _book(self, like: Tensor, never_negative: bool) -> CodeBook:
        key = (never_negative, like.device)
        if key not in self.books:
            self.books[key] = code_book(not never_negative, like.device)
        return self.books[key]


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def divided_like(whole: Tensor, part: Tensor) -> Tensor:
    """`part`, made from what this rank holds of `whole`, as a tensor divided over the ranks as that is."""
    if not is_dtensor(whole):
        return part
    columns = whole.shape[1] * part.shape[1] // local_tensor(whole).shape[1]
    shape = torch.Size((whole.shape[0], columns, *part.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_of_local(part, whole.device_mesh, whole.placements, shape, stride)


_INT8 = Int8Format()


def scales_name(name: str) -> str:
    """The name in a state of the scales that belong to codes of this name."""
    kind, slot, parameter = name.split("/", 2)
    return f"{kind}/{slot}{SCALES}/{parameter}"


def is_scales(name: str) -> bool:
    return name.startswith("optimizer/") and name.split("/")[1].endswith(SCALES)


def opened(name: str, tensors: Mapping[str, Tensor], slot_kind: SlotKind) -> Tensor:
    """A whole tensor of a state; where it is stored in codes, the float32 numbers that they stand for."""
    if (scales := _scales(name, tensors)) is None:
        return tensors[name]
    return _INT8.open((tensors[name], scales), _is_squares(name, slot_kind))


def opened_dtype(name: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that `opened` gives."""
    return tensors[name].dtype if _scales(name, tensors) is None else torch.float32


@torch.no_grad()
def fill_moment(name: str, tensors: Mapping[str, Tensor], value: Tensor, slot_kind: SlotKind) -> None:
    """Fill a tensor of a state with a whole value, in the format in which it is stored: this rank's part of it."""
    if (scales := _scales(name, tensors)) is None:
        return fill_tensor(tensors[name], value)
    codes, scales = local_tensor(tensors[name]), local_tensor(scales)
    here = torch.empty_like(codes, dtype=torch.float32)
    for part in local_shards(tensors[name]):
        here[part.place].copy_(value[part.box.slices])
    closed = _INT8.close(here, _is_squares(name, slot_kind), None, scales.shape[1])
    for own, now in zip((codes, scales), closed, strict=True):
        own.copy_(now)


def _scales(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    if not name.startswith("optimizer/"):
        return None
    scales = tensors.get(scales_name(name))
    return scales if scales is not None and scales.numel() else None


def _is_squares(name: str, slot_kind: SlotKind) -> bool:
    return slot_kind(name.split("/")[1]) == "squares"
