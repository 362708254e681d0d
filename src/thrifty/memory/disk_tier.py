"""A disk as a tier: tensors in files without a name, written and read by a thread of their own.

A file loses its name as soon as it is open, so that nothing remains of it once the process is gone, however it went.
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

VAR_TMP = "/var/tmp"  # noqa: S108 - files without a name cannot be found by others
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ALIGNMENT = 64
"""Bytes, of tensors in one mapped file."""


def scratch_folder(folder: str = "") -> Path:
    """The folder given, or $TMPDIR, or /var/tmp, which unlike /tmp is hardly ever in memory."""
    usual = VAR_TMP if os.access(VAR_TMP, os.W_OK) else tempfile.gettempdir()
    path = Path(folder or os.environ.get("TMPDIR") or usual).expanduser()
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise RefusedError(f"{path} is no folder that can be written to", fix="give another as `folder`")
    return path


class DiskTier(StorageTier):
    """What is sent lies in one file, in places that are used again for tensors of the same size."""

    def __init__(self, folder: str = ""):
        super().__init__("disk")
        self.folder = scratch_folder(folder)
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = self._out = 0

    def __str__(self) -> str:
        return f"disk of {self.folder}"

    @cached_property
    def file(self) -> FileIO:
        return _nameless(self.folder)

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "thrifty-disk")

    def allocate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values in one file, mapped into memory: the system keeps there what is in use."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return list(tensors)
        parts = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]
        return [
            on_part(tensor, lambda _, new=new: new) for tensor, new in zip(tensors, self._mapped(parts), strict=True)
        ]

    def take(self, size: int) -> int:
        """Where in the file that many bytes go."""
        self.holds(size)
        with self.lock:
            if self._out == 0 < self._end:  # what was written for an earlier step need not reach the disk at all
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

    def _ticket(self, tensor: Tensor) -> OffloadHandle:
        return _DiskHandle(self, tensor)

    def _mapped(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        total = sum(sizes)
        if not total:
            return list(parts)
        with in_words(self.folder, total), _nameless(self.folder) as file:
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
        with in_words(self.tier.folder, self.bytes):
            file = self.tier.file
        # the thread has the file, whose number may be another's once it is closed, and empties the list,
        # so that once it is done only others hold the tensor
        return self.tier.thread.submit(_on_memory, work, file, self.place, [tensor])

    def _gone(self) -> None:
        with in_words(self.tier.folder, self.bytes):
            self._written.result()

    def _fetch(self, into: Tensor) -> None:
        self._landing = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        self._read = self._begin(_read, self._landing)
        self.tier.account.returned += self.bytes

    def _arrived(self, into: Tensor) -> None:
        assert self._read is not None
        with in_words(self.tier.folder, self.bytes):
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
            raise OSError(errno.EIO, "the file ends too early")
        place, data = place + read, data[read:]


def _nameless(folder: Path) -> FileIO:
    return cast(FileIO, tempfile.TemporaryFile(dir=folder, prefix="thrifty-", buffering=0))


def _reserve(file: FileIO, size: int) -> None:
    """Room on the disk now, since a mapped file that finds none later ends the process without a word."""
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
def in_words(folder: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise InfeasibleError(
                f"{folder} has no room for another {size:,} bytes ({error.strerror})",
                fix="make room there, or give a `folder` on a larger disk",
            ) from error
        raise ThriftyError(f"{folder} failed: {error.strerror}", fix="give another `folder`") from error
