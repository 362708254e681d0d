"""Disk as an offload tier: tensors in unnamed files, which one thread writes and reads.

A file is unlinked as soon as it is open. It therefore disappears when the process ends for any reason.
"""

import errno
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.dtensors import is_dtensor
from thrifty.core.errors import InfeasibleError, RefusedError, ThriftyError
from thrifty.memory.storage_tier import OffloadHandle, StorageTier, is_dense, memory_of, on_part

VAR_TMP = "/var/tmp"  # noqa: S108 - other processes cannot find unnamed files
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ALIGNMENT = 64
"""Alignment in bytes of tensors in a mapped file."""


def scratch_folder(folder: str = "") -> Path:
    """Return `folder`, or by default $TMPDIR or /var/tmp. Unlike /tmp, /var/tmp is rarely in memory."""
    usual = VAR_TMP if os.access(VAR_TMP, os.W_OK) else tempfile.gettempdir()
    path = Path(folder or os.environ.get("TMPDIR") or usual).expanduser()
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise RefusedError(f"{str(path)!r} is not a writable folder", fix="set `folder` to a writable folder")
    return path


class DiskTier(StorageTier):
    """Tier in one file. Freed space is reused for tensors of the same size."""

    def __init__(self, folder: str = ""):
        super().__init__("disk")
        self.folder = scratch_folder(folder)
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = self._out = 0

    def __str__(self) -> str:
        return f"disk of {self.folder}"

    @cached_property
    def file(self) -> FileIO:
        return _unnamed_file(self.folder)

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "thrifty-disk")

    def allocate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the values in one memory-mapped file. The system caches the parts in use in memory."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return list(tensors)
        parts = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]
        return [
            on_part(tensor, lambda _, new=new: new) for tensor, new in zip(tensors, self._mapped(parts), strict=True)
        ]

    def take(self, size: int) -> int:
        """Reserve `size` bytes in the file, and return their offset."""
        self.holds(size)
        with self.lock:
            if self._out == 0 < self._end:  # data of an earlier step need not be written any more
                self._free.clear()
                self._end = 0
                self.thread.submit(self.file.truncate, 0)
            self._out += 1
            free = self._free[size]
            place = free.pop() if free else self._end
            self._end = max(self._end, place + size)
        return place

    def give_back(self, place: int, size: int) -> None:
        self.holds(-size)
        with self.lock:
            self._free[size].append(place)
            self._out -= 1

    def _handle(self, tensor: Tensor) -> OffloadHandle:
        return _DiskHandle(self, tensor)

    def _mapped(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        total = sum(sizes)
        if not total:
            return list(parts)
        with translated_errors(self.folder, total), _unnamed_file(self.folder) as file:
            _reserve(file, total)
            mapping = mmap.mmap(file.fileno(), total)
        self.holds(total)
        weakref.finalize(mapping, self.holds, -total)
        return [_copied(part, mapping, start) for part, start in zip(parts, accumulate(sizes, initial=0), strict=False)]


class _DiskHandle(OffloadHandle):
    def __init__(self, tier: DiskTier, tensor: Tensor):
        super().__init__(tensor)
        self.tier, self.place = tier, tier.take(self.bytes)
        self._read: Future[None] | None = None
        self._written = self._begin(_write, tensor.cpu())

    def _begin(self, work: Callable[[FileIO, int, memoryview], None], tensor: Tensor) -> "Future[None]":
        with translated_errors(self.tier.folder, self.bytes):
            file = self.tier.file
        # pass the file, because the descriptor of a closed file may be reused; the thread empties the list,
        # so that it does not keep the tensor alive
        return self.tier.thread.submit(_on_memory, work, file, self.place, [tensor])

    def _gone(self) -> None:
        with translated_errors(self.tier.folder, self.bytes):
            self._written.result()

    def _fetch(self, into: Tensor) -> None:
        self._landing = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        self._read = self._begin(_read, self._landing)
        self.tier.account.returned += self.bytes

    def _arrived(self, into: Tensor) -> None:
        assert self._read is not None
        with translated_errors(self.tier.folder, self.bytes):
            self._read.result()
        if self._landing is not into:
            into.copy_(self._landing)
        del self._landing

    def __del__(self) -> None:
        self.tier.give_back(self.place, self.bytes)


def _on_memory(
    work: Callable[[FileIO, int, memoryview], None], file: FileIO, place: int, tensors: list[Tensor]
) -> None:
    tensor = tensors.pop()
    work(file, place, memory_of(tensor))


def _write(file: FileIO, place: int, data: memoryview) -> None:
    while len(data):
        written = os.pwrite(file.fileno(), data, place)
        place, data = place + written, data[written:]


def _read(file: FileIO, place: int, data: memoryview) -> None:
    while len(data):
        read = os.preadv(file.fileno(), [data], place)
        if not read:
            raise OSError(errno.EIO, "the file is truncated")
        place, data = place + read, data[read:]


def _unnamed_file(folder: Path) -> FileIO:
    return cast(FileIO, tempfile.TemporaryFile(dir=folder, prefix="thrifty-", buffering=0))


def _reserve(file: FileIO, size: int) -> None:
    """Reserve disk space. Without space, writing to a mapped file would later kill the process without an error."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = memoryview(bytes(min(size, 1 << 20)))
    for place in range(0, size, len(zeros)):
        _write(file, place, zeros[: size - place])


def _copied(part: Tensor, mapping: mmap.mmap, start: int) -> Tensor:
    if not part.numel():
        return part
    flat = torch.frombuffer(mapping, dtype=part.dtype, count=part.numel(), offset=start)
    placed = flat.as_strided(part.shape, part.stride()) if is_dense(part) else flat.view(part.shape)
    return placed.copy_(part.detach())


@contextmanager
def translated_errors(folder: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise InfeasibleError(
                f"{str(folder)!r} has no space for another {size:,} bytes ({error.strerror})",
                fix="free some space there; or set `folder` to a folder on a larger disk",
            ) from error
        raise ThriftyError(
            f"writing to {str(folder)!r} failed: {error.strerror}", fix="set another `folder`"
        ) from error
