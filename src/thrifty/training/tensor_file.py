"""Tensors in safetensors files, whole or in pieces, written as a stream and read into any sharding.

A file holds each tensor's piece that one rank owns; where the piece lies in the full tensor stands in the file's own
header, under the key that torch's `HuggingFaceStorageWriter` uses, so `torch.distributed.checkpoint` reads these files
too. Its savers are not used: they plan by exchanging pickled objects, and its native `.metadata` is a pickle, which can
run code when read. Writing is ours because a stream needs the memory of one tensor and can be hashed on its way to the
disk; reading is the safetensors library's, which checks the header.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from thrifty.core.errors import IntegrityError, UsageError

_SHARDING = "DCP_SHARDING_INFO"

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Box:
    """The part of a full tensor of shape `full` that starts at `offset` and has shape `shape`."""

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `other`."""
        places = zip(self.offset, other.offset, self.shape, strict=True)
        return tuple(slice(start - origin, start - origin + length) for start, origin, length in places)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, stored in a file."""

    file: Path
    box: Box
    dtype: torch.dtype


def local_boxes(tensors: dict[str, torch.Tensor]) -> dict[str, Box]:
    """Which part of each tensor this rank holds: all of a plain tensor, the local shard of a DTensor.

    Raises `UsageError` for what a safetensors file cannot hold.
    """
    return {name: _local_box(name, tensor) for name, tensor in tensors.items()}


def _local_box(name: str, tensor: torch.Tensor) -> Box:
    if tensor.dtype not in _CODES or tensor.layout != torch.strided or tensor.is_meta:
        kind = "a meta tensor" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
        raise UsageError(f"tensor {name!r} cannot be stored: {kind}", "keep state in dense tensors of a standard dtype")
    full = tuple(tensor.shape)
    if not hasattr(tensor, "__create_chunk_list__"):
        return Box(full, (0,) * len(full), full)
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise UsageError(f"tensor {name!r} has {len(chunks)} local shards", "shard it in one piece per rank")
    return Box(full, tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values, sharing memory with `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def stored_bytes(tensors: dict[str, torch.Tensor], boxes: dict[str, Box]) -> int:
    """Bytes of the file that `stream` writes."""
    return len(_header(tensors, boxes)) + sum(_size(tensors[name], box) for name, box in boxes.items())


def stream(tensors: dict[str, torch.Tensor], boxes: dict[str, Box]) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file with this rank's values of `boxes`, one tensor in memory at a time."""
    yield _header(tensors, boxes)
    for name in _order(tensors, boxes):
        values = local_values(tensors[name]).resolve_conj().resolve_neg().contiguous().cpu()
        if values.numel():
            yield memoryview(values.reshape(-1).view(torch.uint8).numpy())


def _size(tensor: torch.Tensor, box: Box) -> int:
    return box.numel * tensor.element_size()


def _order(tensors: dict[str, torch.Tensor], boxes: dict[str, Box]) -> list[str]:
    """Widest elements first, so that every tensor starts at a multiple of its element size."""
    return sorted(boxes, key=lambda name: (-tensors[name].element_size(), name))


def _header(tensors: dict[str, torch.Tensor], boxes: dict[str, Box]) -> bytes:
    places = {name: {"saved_offsets": box.offset, "shape": box.full} for name, box in boxes.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _SHARDING: json.dumps(places)}}
    start = 0
    for name in _order(tensors, boxes):
        end = start + _size(tensors[name], boxes[name])
        code = _CODES[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": boxes[name].shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Stored:
    """The tensors of one or more files: `pieces` by name, and `read` into memory of any sharding."""

    def __init__(self, files: list[Path]):
        self._open: dict[Path, Any] = {}
        self.pieces: dict[str, list[Piece]] = {}
        for file in files:
            try:
                self._open[file] = safe_open(file, framework="pt")
                for name, piece in _pieces(file, self._open[file]):
                    self.pieces.setdefault(name, []).append(piece)
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                raise IntegrityError(f"{file} is not a tensor file of a checkpoint: {error}") from error

    def describe(self, name: str) -> str:
        """Dtype and full shape, for messages and to compare."""
        return f"{self.pieces[name][0].dtype} {self.pieces[name][0].box.full}"

    def full(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        box = self.pieces[name][0].box
        target = torch.empty(box.full, dtype=self.pieces[name][0].dtype)
        self.read(name, Box(box.full, (0,) * len(box.full), box.full), target)
        return target

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copies the part `box` of a tensor into `target`, which has its shape; only what overlaps is read."""
        filled = 0
        for piece in self.pieces[name]:
            source = self._open[piece.file]
            if not box.full:
                target.copy_(source.get_tensor(name))
                return
            overlap = _overlap(box, piece.box)
            if overlap.numel:
                values = source.get_slice(name)[overlap.within(piece.box)]
                target[overlap.within(box)].copy_(values)
                filled += overlap.numel
        if filled != target.numel():
            raise IntegrityError(f"the checkpoint holds {filled} of the {target.numel()} values wanted of {name!r}")


def _overlap(one: Box, other: Box) -> Box:
    """What both boxes hold; empty if nothing."""
    start = [max(pair) for pair in zip(one.offset, other.offset, strict=True)]
    ends = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    shape = [max(0, min(a + n, b + m) - first) for (a, n, b, m), first in zip(ends, start, strict=True)]
    return Box(one.full, tuple(start), tuple(shape))


def _pieces(file: Path, source: Any) -> Iterator[tuple[str, Piece]]:
    places = json.loads((source.metadata() or {}).get(_SHARDING, "{}"))
    for name in source.keys():  # noqa: SIM118 (not a mapping)
        stored = source.get_slice(name)
        shape = tuple(stored.get_shape())
        place = places.get(name, {"saved_offsets": [0] * len(shape), "shape": shape})
        box = Box(tuple(place["shape"]), tuple(place["saved_offsets"]), shape)
        yield name, Piece(file, box, _DTYPES[stored.get_dtype()])
