"""Where tensors can go that the device has no room for: the memory of the host, a disk, or a simulation of either.

    tier = tier_for("auto", tensor)   the host's memory for a tensor of a GPU, a disk for one of a processor
    ticket = tier.send(tensor)        its way out begins; nobody may change the tensor from here on
    ticket.finish_transfer()          its memory is free again, if nobody else holds it
    ticket.prefetch()                 its way back begins: memory for it is taken now
    tensor = ticket.get()             waits for it; may be asked again; what was never settled is given as it is
    tier.allocate(tensors)            the same values on the tier for good, computed on in place by a processor
    tier.account                      bytes there now, at most, and moved either way

A ticket that is dropped frees its place. Nothing on a tier is a tensor that an operation made, so that whoever counts
the device's memory (`StepTrace`) need not know of tiers; fake tensors are sent and come back without moving a byte.
`DiskTier` is in `disk_tier.py`; `SimulatedTier`, with the clock of a link of given bandwidth, in `simulated_tier.py`;
what they share in `storage_tier.py`.
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
"""Roughly that of a GPU on 16 lanes of PCIe 4."""


def tier_for(where: Where, tensor: Tensor, folder: str = "") -> StorageTier:
    """The tier to which tensors like this one go; the same at every call. `folder` is where a disk's files are made.

    Raises UsageError for a tier that there is none of, and RefusedError for the host where there is no GPU whose memory
    it would be beside.
    """
    if where not in get_args(Where):
        raise UsageError(f"there is no tier {where!r}", fix=did_you_mean(where, get_args(Where)))
    fake = isinstance(tensor, FakeTensor)
    beside_a_gpu = torch.cuda.is_available() and (fake or tensor.device.type == "cuda")
    if where == "host" and not beside_a_gpu:
        raise RefusedError(
            "the host's memory is where the tensors of this run are already: it runs on the processor",
            fix='use to="disk", or run on a GPU',
        )
    if where == "auto":
        where = "host" if beside_a_gpu else "disk"
    if fake:
        return StorageTier(where)
    return _tier(where, tensor.device if where == "host" else None, folder if where == "disk" else "")


@cache
def _tier(where: Where, device: torch.device | None, folder: str) -> StorageTier:
    if device is not None:
        return PinnedHostTier(device)
    return SimulatedTier(SIMULATED_LINK) if where == "simulated" else DiskTier(folder)


class PinnedHostTier(HostTier):
    """Pinned memory of the machine beside a GPU, reached by copies on two streams of their own.

    Tickets hold up no processor: every wait is the computing stream's for an event. What leaves is held by its ticket
    until that stream has been told to wait for the copy, and the memory of what comes back belongs to that stream, so
    that the allocator must be told of the other streams only where a ticket is dropped half-way.
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
        self.back.wait_stream(self.computing())  # which may still read what is written over
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
        """Pinned bytes, used before where there are some: the stream `out` then waits for what was last done there."""
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
        tier.out.wait_stream(tier.computing())  # where the values come to be
        with torch.cuda.stream(tier.out), untraced():  # of memory that is not the device's
            self.buffer = tier.take(self.bytes)
            self.copy = self.buffer.view(self.dtype).as_strided(self.shape, self.stride)
            self.copy.copy_(tensor, non_blocking=True)
        self.gone = self.last_use = tier.out.record_event()

    def _gone(self) -> None:
        self.tier.computing().wait_event(self.gone)

    def _fetch(self, into: Tensor) -> None:
        back = self.tier.back
        # its memory may have been freed just now, with work on it still before the computing stream
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
