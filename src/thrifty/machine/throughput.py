"""Training throughput of this machine in FLOP/s."""

from dataclasses import dataclass

import torch

from thrifty.core.errors import UsageError
from thrifty.machine.machine_info import peak_flops


@dataclass(frozen=True)
class Throughput:
    device: str
    devices: int
    dtype: str
    """Data type with the fastest matrix products on this machine."""
    peak: float
    """FLOP/s of matrix products, measured on one device and multiplied by the number of devices."""
    utilisation: float

    @property
    def sustained(self) -> float:
        """Assumed FLOP/s of training."""
        return self.peak * self.utilisation


def measure_throughput(utilisation: float) -> Throughput:
    """Measure matrix products for about half a second. Training steps are assumed to reach the fraction `utilisation`
    of the measured rate. `thrifty train` reports the utilization of a run."""
    if not 0 < utilisation <= 1:
        raise UsageError(f"utilisation is {utilisation:g}, but must be above 0 and at most 1", fix="--utilisation 0.4")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    devices = max(1, torch.cuda.device_count())
    rates = {dtype: peak_flops(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    fastest = max(rates, key=lambda dtype: rates[dtype])
    name = str(fastest).removeprefix("torch.")
    return Throughput(device, devices, name, devices * rates[fastest], utilisation)
