"""Base classes of offload tiers: memory outside the device, and handles of tensors that are offloaded to it."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.dtensors import dtensor_of_local, is_dtensor


@dataclass
class TierUsage:
    """Bytes on a tier now and at the peak, and bytes moved in each direction."""

    now: int = 0
    peak: int = 0
    sent: int = 0
    returned: int = 0


class OffloadHandle:
    """Handle of a tensor on a tier. The base class is for fake tensors and moves no bytes."""

    def __init__(self, tensor: Tensor):
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.bytes = tensor.numel() * tensor.element_size()
        self._leaving: Tensor | None = tensor
        self._coming: Tensor | None = None

    def finish_transfer(self) -> None:
        """Wait for the transfer and release the tensor. Its device memory is then free if nothing else uses it."""
        if self._leaving is not None:
            self._gone()
            self._leaving = None

    def prefetch(self) -> None:
        """Allocate device memory and start the transfer back. Has no effect before `finish_transfer`."""
        if self._leaving is None and self._coming is None:
            self._coming = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            self._fetch(self._coming)

    def get(self) -> Tensor:
        """Wait for the transfer back and return the tensor. A second call transfers it again."""
        if self._leaving is not None:
            return self._leaving
        self.prefetch()
        assert self._coming is not None
        self._arrived(self._coming)
        tensor, self._coming = self._coming, None
        return tensor

    def _gone(self) -> None:
        """Wait until the memory of the sent tensor may be reused."""

    def _fetch(self, into: Tensor) -> None:
        """Start to copy the values into a tensor."""

    def _arrived(self, into: Tensor) -> None:
        """Wait for the transfer that `_fetch` started."""


class StorageTier:
    """Memory for offloaded tensors. The base class accepts only fake tensors."""

    def __init__(self, name: str):
        self.name = name
        self.account = TierUsage()
        self.lock = RLock()  # the garbage collector may drop a handle at any time

    def __str__(self) -> str:
        return self.name

    def send(self, tensor: Tensor) -> OffloadHandle:
        """Start the transfer of a tensor, and return its handle. The tensor must not change any more."""
        tensor = tensor.detach()
        if isinstance(tensor, FakeTensor):
            return OffloadHandle(tensor)
        handle = self._handle(tensor if is_dense(tensor) else tensor.contiguous())
        self.account.sent += handle.bytes
        return handle

    def allocate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return permanent copies in this memory. A CPU updates them in place.

        For a sharded tensor, only this rank's part is copied.
        """
        return [tensor if isinstance(tensor, FakeTensor) else on_part(tensor, self._put) for tensor in tensors]

    def _put(self, part: Tensor) -> Tensor:
        placed = self._placed(part)
        self.holds(placed.nbytes)
        weakref.finalize(placed.untyped_storage(), self.holds, -placed.nbytes)
        return placed

    def _handle(self, tensor: Tensor) -> OffloadHandle:
        raise NotImplementedError

    def _placed(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    def holds(self, size: int) -> None:
        """Add `size` bytes to the usage; `size` may be negative."""
        with self.lock:
            self.account.now += size
            self.account.peak = max(self.account.peak, self.account.now)


class HostTier(StorageTier):
    """Memory that a CPU can compute on. The CPU can read sent tensors there, and send values back."""

    def there(self, handle: OffloadHandle) -> Tensor:
        """Wait for the transfer and return the copy on the tier. The device memory is then free."""
        raise NotImplementedError

    def bring(self, values: Tensor, into: Tensor) -> None:
        """Start to copy `values`, a tensor that `allocate` returned, to a device tensor."""
        raise NotImplementedError

    def landed(self) -> None:
        """Make later device computations wait for all values that were sent back."""

    def still(self) -> None:
        """Wait until no transfer to the device is running, so that the values may change."""


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor fill one contiguous range of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def on_part(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the tensor with `change` applied to this rank's part."""
    if not is_dtensor(tensor):
        return change(tensor)
    part = change(tensor.to_local())
    return dtensor_of_local(part, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, readable and writable while the tensor is alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
