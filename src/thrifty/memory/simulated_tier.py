"""Simulated tier: memory separate from the device's memory, with a clock for transfers over its link.

Copies are real and immediate, so that tests detect memory that is shared by mistake. The clock is independent of real
time. The clock advances only by transfers, and by computing seconds that are passed to it.
"""

from dataclasses import dataclass
from math import inf
from typing import Annotated

import torch
from torch import Tensor

from thrifty.core.setting_bounds import Rate, SettingBound, check_bounds
from thrifty.memory.storage_tier import HostTier, OffloadHandle, memory_of


@dataclass(frozen=True)
class SimulatedLink:
    """Simulated link between two memories. Transfers in one direction run one after the other.

    With `duplex` both directions run at the same time. Without it, transfers of both directions share one line.
    """

    bandwidth: Annotated[float, SettingBound(above=0)] = inf
    """Bandwidth in bytes per second."""
    latency: Rate = 0.0
    """Latency in seconds before each transfer."""
    duplex: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, "link")

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


class LinkClock:
    """Clock of a link: end times of transfers, and the seconds that computation has waited for transfers."""

    def __init__(self, link: SimulatedLink):
        self.link = link
        self.now, self.waited = 0.0, 0.0
        self._free = [0.0, 0.0]

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def out(self, size: int) -> float:
        """Return the time at which a transfer of `size` bytes off the device ends, if it starts now."""
        return self._begin(0, size, self.now)

    def back(self, size: int, gone: float) -> float:
        """Return the time at which a tensor is back on the device. The transfer starts now, but not before `gone`, the
        time at which the transfer off the device ends.
        """
        return self._begin(1, size, max(self.now, gone))

    def wait(self, until: float) -> None:
        self.waited += max(until - self.now, 0.0)
        self.now = max(self.now, until)

    def _begin(self, direction: int, size: int, earliest: float) -> float:
        line = direction if self.link.duplex else 0
        self._free[line] = max(self._free[line], earliest) + self.link.seconds(size)
        return self._free[line]


class SimulatedTier(HostTier):
    """Simulated second memory. Call `clock.compute(seconds)` for each computation of the device."""

    def __init__(self, link: SimulatedLink):
        super().__init__("simulated")
        self.clock = LinkClock(link)
        self._landing = 0.0

    def there(self, handle: OffloadHandle) -> Tensor:
        assert isinstance(handle, _SimulatedHandle)
        handle.finish_transfer()
        return handle.read()

    def bring(self, values: Tensor, into: Tensor) -> None:
        into.copy_(values)
        self._landing = self.clock.back(values.nbytes, self.clock.now)
        self.account.returned += values.nbytes

    def landed(self) -> None:
        self.clock.wait(self._landing)

    def _handle(self, tensor: Tensor) -> OffloadHandle:
        return _SimulatedHandle(self, tensor)

    def _placed(self, part: Tensor) -> Tensor:
        return part.detach().clone()


class _SimulatedHandle(OffloadHandle):
    def __init__(self, tier: SimulatedTier, tensor: Tensor):
        super().__init__(tensor)
        tier.holds(self.bytes)
        self.tier = tier
        self.data = bytes(memory_of(tensor.cpu()))  # a tensor would be counted as device memory
        self.gone = tier.clock.out(self.bytes)

    def read(self) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        memory_of(tensor)[:] = self.data
        return tensor

    def _gone(self) -> None:
        self.tier.clock.wait(self.gone)

    def _fetch(self, into: Tensor) -> None:
        if into.device.type == "cpu":
            memory_of(into)[:] = self.data
        else:
            into.copy_(self.read())
        self.tier.account.returned += self.bytes
        self.here = self.tier.clock.back(self.bytes, self.gone)

    def _arrived(self, into: Tensor) -> None:
        self.tier.clock.wait(self.here)

    def __del__(self) -> None:
        self.tier.holds(-self.bytes)
