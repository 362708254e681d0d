"""Offload tiers for tensors that do not fit on the device: host memory, a disk, or a simulated tier.

    tier = tier_for("auto", tensor)   host memory for a GPU tensor, a disk for a CPU tensor
    handle = tier.send(tensor)        starts the transfer; the tensor must not change any more
    handle.finish_transfer()          waits; then device memory is free if nothing else uses it
    handle.prefetch()                 allocates device memory and starts the transfer back
    tensor = handle.get()             waits and returns the tensor; may be repeated
    tier.allocate(tensors)            permanent copies on the tier, updated in place by a CPU
    tier.account                      bytes on the tier now, at the peak, and moved per direction

Dropping a handle frees its space. Data on a tier is not a tensor made by an operation, so `StepTrace` does not count it
as device memory. Fake tensors are sent and returned without moving bytes. Before `finish_transfer`, `get` returns the
tensor itself. `DiskTier` is in `disk_tier.py`, `SimulatedTier` in `simulated_tier.py`, base classes in
`storage_tier.py`.
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
"""Simulated link about as fast as a GPU on 16 lanes of PCIe 4."""


def tier_for(where: Where, tensor: Tensor, folder: str = "") -> StorageTier:
    """Return the tier for tensors like `tensor`; every call returns the same tier. A disk tier stores files in
    `folder`.

    Raises UsageError for an unknown tier, and RefusedError for host memory without a GPU.
    """
    if where not in get_args(Where):
        raise UsageError(f"unknown tier {where!r}", fix=did_you_mean(where, get_args(Where)))
    fake = isinstance(tensor, FakeTensor)
    has_gpu = torch.cuda.is_available() and (fake or tensor.device.type == "cuda")
    if where == "host" and not has_gpu:
        raise RefusedError(
            "cannot offload to host memory: this run trains on the CPU, so its tensors are already in host memory",
            fix='use to="disk"; or train on a GPU',
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
    """Pinned host memory of a GPU. Copies in each direction run on a separate CUDA stream.

    Handles do not block the CPU: the compute stream waits for CUDA events. A handle references an outgoing tensor until
    the compute stream waits for its copy. Incoming memory is allocated on the compute stream. The allocator therefore
    needs `record_stream` only if a handle is dropped during a transfer.
    """

    def __init__(self, device: torch.device):
        super().__init__("host")
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event]]] = defaultdict(list)

    def there(self, handle: OffloadHandle) -> Tensor:
        assert isinstance(handle, _PinnedHostHandle)
        handle.gone.synchronize()
        handle.finish_transfer()
        return handle.copy

    def bring(self, values: Tensor, into: Tensor) -> None:
        self.back.wait_stream(self.computing())  # the compute stream may still read the memory that is overwritten
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
        """Return pinned bytes, reused if possible. The stream `out` waits for the last use of reused bytes."""
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

    def _handle(self, tensor: Tensor) -> OffloadHandle:
        return _PinnedHostHandle(self, tensor)

    def _placed(self, part: Tensor) -> Tensor:
        return part.detach().to("cpu", copy=True).pin_memory()


class _PinnedHostHandle(OffloadHandle):
    def __init__(self, tier: PinnedHostTier, tensor: Tensor):
        super().__init__(tensor)
        self.tier = tier
        tier.out.wait_stream(tier.computing())  # the compute stream computes the values
        with torch.cuda.stream(tier.out), untraced():  # host memory does not count as device memory
            self.buffer = tier.take(self.bytes)
            self.copy = self.buffer.view(self.dtype).as_strided(self.shape, self.stride)
            self.copy.copy_(tensor, non_blocking=True)
        self.gone = self.last_use = tier.out.record_event()

    def _gone(self) -> None:
        self.tier.computing().wait_event(self.gone)

    def _fetch(self, into: Tensor) -> None:
        back = self.tier.back
        # queued kernels of the compute stream may still use memory that was just freed
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
