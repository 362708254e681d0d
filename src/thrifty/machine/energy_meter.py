"""Energy use of the machine, from hardware counters: RAPL for CPUs, NVML for GPUs.

Both counters measure the whole package or device, including other programs.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class EnergyCounter:
    read: Callable[[], float]
    """Function that returns joules since a fixed moment. Raises OSError if the counter cannot be read."""
    wraps: float = 0.0
    """Joules after which the counter restarts at 0; 0 if it never restarts."""


@dataclass
class EnergyMeter:
    """Meter of joules since the meter was created. Read it at least once per minute, because CPU counters wrap
    around."""

    counters: dict[str, EnergyCounter]
    """Counters by name; empty after a counter could not be read."""
    last: dict[str, float] = field(default_factory=dict)
    joules: float = 0.0

    def __post_init__(self) -> None:
        self.read_joules()

    def read_joules(self) -> float | None:
        """Return the joules so far. Return None without counters, or if a counter could not be read."""
        try:
            for name, counter in self.counters.items():
                now = counter.read()
                moved = now - self.last.get(name, now)
                self.joules += moved + counter.wraps if moved < 0 else moved
                self.last[name] = now
        except OSError:
            self.counters = {}
        return self.joules if self.counters else None


def counters(powercap: Path = POWERCAP) -> dict[str, EnergyCounter]:
    """Return the readable energy counters of this machine; {} if there are none."""
    return {**_processors(powercap), **_gpus()}


def _processors(powercap: Path) -> dict[str, EnergyCounter]:
    """Return the counters of CPU packages, which include cores and memory controllers. If a machine lists a package
    twice, with two paths to one counter, the counter is returned once."""
    meters: dict[str, EnergyCounter] = {}
    for zone in sorted(powercap.glob("*:*")):
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if not name.startswith("package") or name in meters:
                continue
            file, wraps = zone / "energy_uj", float((zone / "max_energy_range_uj").read_text()) / 1e6
            counter = EnergyCounter(lambda file=file: float(file.read_text()) / 1e6, wraps)
            counter.read()
            meters[name] = counter
    return meters


def _gpus() -> dict[str, EnergyCounter]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return {}
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except (OSError, AttributeError):
        return {}
    meters = {}
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        counter = EnergyCounter(lambda device=device: _millijoules(library, device) / 1e3)
        with suppress(OSError):
            counter.read()
            meters[f"gpu {index}"] = counter
    return meters


def _millijoules(library: ctypes.CDLL, device: ctypes.c_void_p) -> int:
    value = ctypes.c_ulonglong()
    if error := library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(value)):
        raise OSError(f"NVML returned error {error}")
    return value.value
