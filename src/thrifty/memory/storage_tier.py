"""A memory other than the device's, and what stands for a tensor that has gone there: the parts common to all tiers."""

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
    """Bytes on a tier now and at most, and moved in either direction."""

    now: int = 0
    peak: int = 0
    sent: int = 0
    returned: int = 0


class OffloadHandle:
    """What stands for a tensor that is on a tier. By itself it is that of a fake tensor and moves no bytes."""

    def __init__(self, tensor: Tensor):
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.bytes = tensor.numel() * tensor.element_size()
        self._leaving: Tensor | None = tensor
        self._coming: Tensor | None = None

    def finish_transfer(self) -> None:
        """From here on the device's memory is free, if nobody else holds the tensor."""
        if self._leaving is not None:
            self._gone()
            self._leaving = None

    def prefetch(self) -> None:
        """Takes memory for the way back and begins it. What has not been settled is still here."""
        if self._leaving is None and self._coming is None:
            self._coming = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            self._fetch(self._coming)

    def get(self) -> Tensor:
        """The tensor, once it is back. It may be asked for again, and is then brought again."""
        if self._leaving is not None:
            return self._leaving
        self.prefetch()
        assert self._coming is not None
        self._arrived(self._coming)
        tensor, self._coming = self._coming, None
        return tensor

    def _gone(self) -> None:
        """Waits until the memory of what leaves may be used again."""

    def _fetch(self, into: Tensor) -> None:
        """Begins to fill a tensor with the values."""

    def _arrived(self, into: Tensor) -> None:
        """Waits until what `_fetch` began is done."""


class StorageTier:
    """A memory. By itself one to which only fake tensors go."""

    def __init__(self, name: str):
        self.name = name
        self.account = TierUsage()
        self.lock = RLock()  # the collector may drop a ticket in the middle of anything

    def __str__(self) -> str:
        return self.name

    def send(self, tensor: Tensor) -> OffloadHandle:
        """Begins the way out of a tensor, which must not be changed any more."""
        tensor = tensor.detach()
        if isinstance(tensor, FakeTensor):
            return OffloadHandle(tensor)
        ticket = self._ticket(tensor if is_dense(tensor) else tensor.contiguous())
        self.account.sent += ticket.bytes
        return ticket

    def allocate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values in this memory for good, where a processor computes on them in place. Of a tensor that is
        divided over ranks it is this rank's part that goes there."""
        return [tensor if isinstance(tensor, FakeTensor) else on_part(tensor, self._put) for tensor in tensors]

    def _put(self, part: Tensor) -> Tensor:
        placed = self._placed(part)
        self.holds(placed.nbytes)
        weakref.finalize(placed.untyped_storage(), self.holds, -placed.nbytes)
        return placed

    def _ticket(self, tensor: Tensor) -> OffloadHandle:
        raise NotImplementedError

    def _placed(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    def holds(self, size: int) -> None:
        """That many bytes more, or fewer."""
        with self.lock:
            self.account.now += size
            self.account.peak = max(self.account.peak, self.account.now)


class HostTier(StorageTier):
    """A memory on which a processor computes: what has been sent can be read there, and values can be sent back."""

    def there(self, ticket: OffloadHandle) -> Tensor:
        """The copy on the tier, once it has come; the device's memory is free then."""
        raise NotImplementedError

    def bring(self, values: Tensor, into: Tensor) -> None:
        """Begins to copy `placed` values to a tensor of the device."""
        raise NotImplementedError

    def landed(self) -> None:
        """What the device computes from here on sees all that was brought."""

    def still(self) -> None:
        """Waits until nothing is being brought any more, so that the values may be changed."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def on_part(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change of a tensor, made on what this rank holds of it."""
    if not is_dtensor(tensor):
        return change(tensor)
    part = change(tensor.to_local())
    return dtensor_of_local(part, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor of a processor, to be read and written while the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
