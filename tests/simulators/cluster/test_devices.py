"""The table of devices: each figure has a source and agrees with well-known datasheet figures."""

import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.device_specs import DEVICES, measured


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_is_positive_and_has_a_source(device) -> None:
    assert min(device.memory, device.bandwidth, *device.flops.values()) > 0
    assert set(device.sources) == {"flops", "memory", "bandwidth"}
    assert all(device.sources.values())


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_shorter_formats_have_higher_rates(device) -> None:
    formats = ["float32", "tfloat32", "bfloat16", "float16", "float8"]
    rates = [device.flops[number_format] for number_format in formats if number_format in device.flops]
    assert rates == sorted(rates)
    assert max(rates) / device.rate("float32") >= 3


def test_commonly_quoted_figures() -> None:
    assert DEVICES["a100-80gb"].rate("bfloat16") == 312e12
    assert DEVICES["a100-80gb"].bandwidth == 2.039e12
    assert DEVICES["h100"].rate("bfloat16") == pytest.approx(989e12, rel=1e-3)
    assert DEVICES["h100"].rate("float8") == pytest.approx(2 * DEVICES["h100"].rate("float16"), rel=1e-3)
    assert 39e12 / DEVICES["v100-dgx2h"].rate("float16") == pytest.approx(0.30, abs=0.005), "Megatron-LM 2019"


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="v100-16gb has no rate for 'float8'"):
        DEVICES["v100-16gb"].rate("float8")


def test_devices_of_measured_rates() -> None:
    device = measured("this machine", {"float32": 1e11}, 8e9, 2e10, "thrifty plan on this machine")
    assert device.rate("float32") == 1e11
    assert set(device.sources.values()) == {"thrifty plan on this machine"}
    for memory, flops in ((0.0, {"float32": 1e11}), (8e9, {}), (8e9, {"float32": 0.0})):
        with pytest.raises(UsageError, match="above zero"):
            measured("this machine", flops, memory, 2e10, "")
