"""Offload tiers for tensors that do not fit on the device: host memory, a disk, or a simulation of either.

    tier = tier_for("auto", tensor)   host memory for a tensor of a GPU, a disk for a tensor of a CPU
    ticket = tier.send(tensor)        starts the transfer; the tensor must not change from here on
    ticket.finish_transfer()          the tensor's memory is free, if nothing else references it
    ticket.prefetch()                 starts the transfer back and allocates its memory
    tensor = ticket.get()             waits for it; repeatable; before finish_transfer it returns the tensor itself
    tier.allocate(tensors)            copies on the tier for good, updated in place by a CPU
    tier.account                      bytes on the tier: now, peak, and moved in either direction

A dropped ticket frees its space. Data on a tier is not a tensor made by an operation, so that `StepTrace` does not
count it as device memory. Fake tensors are sent and returned without moving a byte. `DiskTier` is in `disk_tier.py`;
`SimulatedTier`, with the clock of a link of fixed bandwidth, in `simulated_tier.py`; shared parts in `storage_tier.py`.
"""

from collections import defaultdict
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.errors import RefusedError, UsageError, did_you_mean
from thrifty.core.tensor_tracing import untraced
from thrifty.memory.disk_tier import DiskTier
from thrifty.memory.simulated_tier import SimulatedLink, SimulatedTier
from thrifty.memory.storage_tier import HostTier, OffloadHandle, StorageTier

Where = Literal["auto", "host", "disk", "simulated"]

SIMULATED_LINK = SimulatedLink(bandwidth=16e9, latency=1e-5)
"""A link about as fast as a GPU on 16 lanes of PCIe 4."""


def tier_for(where: Where, tensor: Tensor, folder: str = "") -> StorageTier:
    """Return the tier for tensors like this one, the same at every call. `folder` holds a disk's files.

    Raises UsageError for an unknown tier, and RefusedError for the host without a GPU.
    """
    if where not in get_args(Where):
        raise UsageError(f"unknown tier {where!r}", fix=did_you_mean(where, get_args(Where)))
    fake = isinstance(tensor, FakeTensor)
    has_gpu = torch.cuda.is_available() and (fake or tensor.device.type == "cuda")
    if where == "host" and not has_gpu:
        raise RefusedError(
            "cannot offload to host memory: the tensors are there already, because this run runs on the processor",
            fix='use to="disk", or run on a GPU',
        )
    if where == "auto":
        where = "host" if has_gpu else "disk"
    if fake:
        return StorageTier(where)
    return _tier(where, tensor.device if where == "host" else None, folder if where == "disk" else "")


@cache
def _tier(where: Where, device: torch.device | None, folder: str) -> StorageTier:
    if device is not None:
        return PinnedHostTier(device)
    return SimulatedTier(SIMULATED_LINK) if where == "simulated" else DiskTier(folder)


class PinnedHostTier(HostTier):
    """Pinned host memory of a GPU, reached by copies on two separate streams.

    Tickets do not block the CPU: the compute stream waits for events. A ticket references an outgoing tensor until the
    compute stream waits for its copy, and incoming memory is allocated on that stream. The allocator therefore needs
    `record_stream` only if a ticket is dropped during a transfer.
    """

    def __init__(self, device: torch.device):
        super().__init__("host")
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event]]] = defaultdict(list)

    def there(self, ticket: OffloadHandle) -> Tensor:
        assert isinstance(ticket, _PinnedHostHandle)
        ticket.gone.synchronize()
        ticket.finish_transfer()
        return ticket.copy

    def bring(self, values: Tensor, into: Tensor) -> None:
        self.back.wait_stream(self.computing())  # it may still read the memory that is overwritten
        with torch.cuda.stream(self.back):
            into.copy_(values, non_blocking=True)
        self.account.returned += into.nbytes

    def landed(self) -> None:
        self.computing().wait_stream(self.back)

    def still(self) -> None:
        self.back.synchronize()

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def take(self, size: int) -> Tensor:
        """Return pinned bytes, reused if possible: the stream `out` then waits for their last use."""
        self.holds(size)
        with self.lock:
            if not self._free[size]:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            buffer, last_use = self._free[size].pop()
        self.out.wait_event(last_use)
        return buffer

    def give_back(self, buffer: Tensor, last_use: torch.cuda.Event) -> None:
        self.holds(-buffer.numel())
        with self.lock:
            self._free[buffer.numel()].append((buffer, last_use))

    def _ticket(self, tensor: Tensor) -> OffloadHandle:
        return _PinnedHostHandle(self, tensor)

    def _placed(self, part: Tensor) -> Tensor:
        return part.detach().to("cpu", copy=True).pin_memory()


class _PinnedHostHandle(OffloadHandle):
    def __init__(self, tier: PinnedHostTier, tensor: Tensor):
        super().__init__(tensor)
        self.tier = tier
        tier.out.wait_stream(tier.computing())  # it computes the values
        with torch.cuda.stream(tier.out), untraced():  # host memory does not count as the device's
            self.buffer = tier.take(self.bytes)
            self.copy = self.buffer.view(self.dtype).as_strided(self.shape, self.stride)
            self.copy.copy_(tensor, non_blocking=True)
        self.gone = self.last_use = tier.out.record_event()

    def _gone(self) -> None:
        self.tier.computing().wait_event(self.gone)

    def _fetch(self, into: Tensor) -> None:
        back = self.tier.back
        # the memory may be just freed, while the compute stream still has work on it queued
        back.wait_stream(self.tier.computing())
        back.wait_event(self.gone)
        with torch.cuda.stream(back):
            into.copy_(self.copy, non_blocking=True)
        self.last_use = back.record_event()
        self.tier.account.returned += self.bytes

    def _arrived(self, into: Tensor) -> None:
        self.tier.computing().wait_event(self.last_use)

    def __del__(self) -> None:
        if self._leaving is not None:
            self._leaving.record_stream(self.tier.out)
        if self._coming is not None:
            self._coming.record_stream(self.tier.back)
        self.tier.give_back(self.buffer, self.last_use)
