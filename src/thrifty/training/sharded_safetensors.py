"""Storage of whole or sharded tensors in safetensors files: streamed writes, and reads into any sharding.

A file contains the parts of each tensor that one rank owns. The file header contains the offset of each part in the
full tensor, under the key of torch's `HuggingFaceStorageWriter`. `torch.distributed.checkpoint` can therefore read
these files. Several parts of one tensor are separate entries `NAME[0]`, `NAME[1]`, which torch reads as separate
tensors.

torch's savers are not used, because they exchange pickled objects, and their `.metadata` is a pickle. Reading a pickle
can run code. `stream` has one tensor in memory at a time, and the data are hashed while they are written. Files are
read with the safetensors library, which checks the header.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.old_names import rename_tensor
from thrifty.core.shard_layout import LocalShard, TensorBox, local_shards

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
class StoredBox:
    """A box (a range of indices per dim) of a tensor, stored in a file under the name `entry`."""

    file: Path
    entry: str
    box: TensorBox
    dtype: torch.dtype


Parts = dict[str, list[LocalShard]]
"""The parts of each tensor that a rank owns or writes."""


def local_parts(tensors: dict[str, torch.Tensor]) -> Parts:
    """Return the parts of each tensor that this rank owns. Raise UsageError for a tensor that safetensors cannot
    store."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES or tensor.layout != torch.strided or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
            raise UsageError(
                f"tensor {name!r} cannot be stored: {kind}", "keep state in dense tensors of a standard dtype"
            )
    return {name: local_shards(tensor) for name, tensor in tensors.items()}


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that this rank holds. They share memory with `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass(frozen=True)
class _Entry:
    name: str
    tensor: str
    part: LocalShard
    values: torch.Tensor
    """All values of the tensor that this rank owns."""

    @property
    def bytes(self) -> int:
        return self.part.box.numel * self.values.element_size()


def _entries(tensors: dict[str, torch.Tensor], parts: Parts) -> list[_Entry]:
    """Return the entries in order of decreasing element size, so that every entry is aligned to its element size."""
    all_entries = [
        _Entry(name if len(own) == 1 else f"{name}[{index}]", name, part, local_values(tensors[name]))
        for name, own in parts.items()
        for index, part in enumerate(own)
    ]
    return sorted(all_entries, key=lambda entry: (-entry.values.element_size(), entry.name))


def stored_bytes(tensors: dict[str, torch.Tensor], parts: Parts) -> int:
    """Return the size in bytes of the file that `stream` writes."""
    entries = _entries(tensors, parts)
    return len(_header(entries)) + sum(entry.bytes for entry in entries)


def stream(tensors: dict[str, torch.Tensor], parts: Parts) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a safetensors file with `parts`, one part in memory at a time."""
    entries = _entries(tensors, parts)
    yield _header(entries)
    for entry in entries:
        values = entry.values[entry.part.place].resolve_conj().resolve_neg().contiguous().cpu()
        if values.numel():
            yield memoryview(values.reshape(-1).view(torch.uint8).numpy())


def _header(entries: list[_Entry]) -> bytes:
    places = {
        entry.name: {"saved_offsets": entry.part.box.offset, "shape": entry.part.box.full}
        | ({} if entry.name == entry.tensor else {"part_of": entry.tensor})
        for entry in entries
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _SHARDING: json.dumps(places)}}
    start = 0
    for entry in entries:
        end = start + entry.bytes
        code = _CODES[entry.values.dtype]
        header[entry.name] = {"dtype": code, "shape": entry.part.box.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class StoredTensorBoxes:
    """The tensors of one or more files. `pieces` contains the stored boxes by name; `read` fills any box."""

    def __init__(self, files: list[Path]):
        self._open: dict[Path, Any] = {}
        self.pieces: dict[str, list[StoredBox]] = {}
        for file in files:
            try:
                self._open[file] = safe_open(file, framework="pt")
                for name, piece in _pieces(file, self._open[file]):
                    self.pieces.setdefault(rename_tensor(name), []).append(piece)
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                raise IntegrityError(
                    f"'{file}' is not a tensor file of a checkpoint: {error}", fix="restore it from a backup"
                ) from error

    def describe(self, name: str) -> str:
        """Return dtype and full shape as text."""
        return f"{self.pieces[name][0].dtype} {self.pieces[name][0].box.full}"

    def full(self, name: str) -> torch.Tensor:
        """Return the whole tensor in newly allocated memory."""
        box = self.pieces[name][0].box
        target = torch.empty(box.full, dtype=self.pieces[name][0].dtype)
        self.read(name, TensorBox(box.full, (0,) * len(box.full), box.full), target)
        return target

    def read(self, name: str, box: TensorBox, target: torch.Tensor) -> None:
        """Copy the part `box` of a tensor into `target` of the same shape. Only overlapping stored boxes are read."""
        filled = 0
        for piece in self.pieces[name]:
            source = self._open[piece.file]
            if not box.full:
                target.copy_(source.get_tensor(piece.entry))
                return
            overlap = _overlap(box, piece.box)
            if overlap.numel:
                target[overlap.within(box)].copy_(source.get_slice(piece.entry)[overlap.within(piece.box)])
                filled += overlap.numel
        if filled != target.numel():
            raise IntegrityError(
                f"the checkpoint contains {filled} of the {target.numel()} required values of {name!r}",
                fix="restore the checkpoint from a backup",
            )


def _overlap(one: TensorBox, other: TensorBox) -> TensorBox:
    """Return the intersection of two boxes, which may be empty."""
    start = [max(pair) for pair in zip(one.offset, other.offset, strict=True)]
    ends = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    shape = [max(0, min(a + n, b + m) - first) for (a, n, b, m), first in zip(ends, start, strict=True)]
    return TensorBox(one.full, tuple(start), tuple(shape))


def _pieces(file: Path, source: Any) -> Iterator[tuple[str, StoredBox]]:
    places = json.loads((source.metadata() or {}).get(_SHARDING, "{}"))
    for entry in source.keys():  # noqa: SIM118 (not a mapping)
        stored = source.get_slice(entry)
        shape = tuple(stored.get_shape())
        place = places.get(entry, {"saved_offsets": [0] * len(shape), "shape": shape})
        box = TensorBox(tuple(place["shape"]), tuple(place["saved_offsets"]), shape)
        yield place.get("part_of", entry), StoredBox(file, entry, box, _DTYPES[stored.get_dtype()])
