"""Energy that the machine took, where it counts that itself: processors by RAPL, GPUs by NVML.

Both count the whole package or device, so everything else that runs there too.
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
    """Joules since some moment. Raises OSError where it cannot be read."""
    wraps: float = 0.0
    """Joules after which it starts again at 0; 0 for never."""


@dataclass
class EnergyMeter:
    """Joules since it was made. Ask it at least every minute: a processor's counter may start again after some."""

    counters: dict[str, EnergyCounter]
    """None of them any more once one could not be read."""
    last: dict[str, float] = field(default_factory=dict)
    joules: float = 0.0

    def __post_init__(self) -> None:
        self.read_joules()

    def read_joules(self) -> float | None:
        """What was taken so far; None where nothing counts it, or not all of it."""
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
    """What counts energy here and may be read; {} for nothing."""
    return {**_processors(powercap), **_gpus()}


def _processors(powercap: Path) -> dict[str, EnergyCounter]:
    """Packages alone: cores and memory controllers inside of them are parts of those. Some machines show a package
    twice, by another way to the same counter."""
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
        raise OSError(f"NVML says {error}")
    return value.value
