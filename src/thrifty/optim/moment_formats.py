"""Storage formats of optimizer moments (float32, bfloat16, 8-bit), and conversion between formats.

An 8-bit moment has two slots: quantized values under the moment's name, and scales under that name plus `.scales`. A
row is divided into blocks with one scale each, and a block never spans two ranks. A sharded row therefore has the same
format as a whole row. The moment is requantized only if a mesh requires another number of blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from thrifty.core.dtensors import dtensor_of_local, is_dtensor
from thrifty.core.gradient_transform import Content
from thrifty.core.shard_layout import local_shards, local_tensor, order_of
from thrifty.core.state import fill_tensor
from thrifty.kernels.blockwise_quantization import BLOCK, CodeBook, block_count, code_book, dequantize, quantize
from thrifty.kernels.stochastic_rounding import round_to_bfloat16

SHORTEST_ROW = 16
"""Minimum number of elements per block. Below it, scales need as much memory as quantization saves."""
SCALES = ".scales"
"""Suffix of the slot name of scales."""

Seed = int | Tensor | None
"""Seed of the step for stochastic rounding. None rounds to nearest."""
SlotKind = Callable[[str], Content]


class StateFormat(Protocol):
    parts: Sequence[str]
    """Suffixes of the slot names of a moment."""

    def blocks(self, moment: Tensor, parameter: Tensor) -> int:
        """Return the number of blocks in this rank's part of each row. Return 0 if the moment stays in float32."""
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


def divided_like(whole: Tensor, part: Tensor) -> Tensor:
    """Return `part` (rows, columns, …), computed from this rank's part of `whole`, as a DTensor with the placements of
    `whole`."""
    if not is_dtensor(whole):
        return part
    columns = whole.shape[1] * part.shape[1] // local_tensor(whole).shape[1]
    shape = torch.Size((whole.shape[0], columns, *part.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_of_local(part, whole.device_mesh, whole.placements, shape, stride)


_INT8 = Int8Format()


def scales_name(name: str) -> str:
    """Return the name of the scales of a quantized tensor in an optimizer state."""
    kind, slot, parameter = name.split("/", 2)
    return f"{kind}/{slot}{SCALES}/{parameter}"


def is_scales(name: str) -> bool:
    return name.startswith("optimizer/") and name.split("/")[1].endswith(SCALES)


def opened(name: str, tensors: Mapping[str, Tensor], slot_kind: SlotKind) -> Tensor:
    """Return a whole tensor of an optimizer state. 8-bit tensors are dequantized to float32."""
    if (scales := _scales(name, tensors)) is None:
        return tensors[name]
    return _INT8.open((tensors[name], scales), _is_squares(name, slot_kind))


def opened_dtype(name: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    return tensors[name].dtype if _scales(name, tensors) is None else torch.float32


@torch.no_grad()
def fill_moment(name: str, tensors: Mapping[str, Tensor], value: Tensor, slot_kind: SlotKind) -> None:
    """Fill this rank's part of a state tensor from a whole `value` of its shape. A tensor stored in 8 bits receives
    quantized values."""
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
