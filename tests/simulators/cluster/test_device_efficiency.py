"""Fitted efficiencies against published throughput. Each row is simulated by a fit without its model size."""

import math
from collections import Counter

import numpy as np
import pytest
from tools.fit_device_efficiency import PARAMETERS, SIZES, ThroughputRow, fit, read_rows

from thrifty.simulators.cluster.device_efficiency import OTHERS, DeviceEfficiency, find_efficiency, fitted_devices
from thrifty.simulators.cluster.device_specs import DEVICES

ROWS = read_rows()
FITTED = [name for name in fitted_devices() if name != OTHERS]


def left_out(device: str, number_format: str | None = None) -> list[tuple[ThroughputRow, float]]:
    """Return (row, simulated / measured) by the stored fit of the other folds."""
    groups = fitted_devices()[device]["left_out"]
    rates = {int(fold): DeviceEfficiency(**judged["efficiency"]) for fold, judged in groups.items()}
    rows = [row for row in ROWS if row.device == device and number_format in (None, row.number_format)]
    return [(row, row.simulated(rates[row.fold]) / row.measured) for row in rows]


def test_models_have_their_published_parameters() -> None:
    assert len(ROWS) == 109 and all(abs(row.workload.parameters - row.parameters) < 2 for row in ROWS)


def test_folds_separate_model_sizes() -> None:
    assert len({(row.model, row.fold) for row in ROWS}) == len(SIZES)
    for device in FITTED:
        assert set(Counter(str(row.fold) for row in ROWS if row.device == device)) == set(
            fitted_devices()[device]["left_out"]
        )


@pytest.mark.parametrize(("device", "share"), [("h100", 0.8), ("a100-80gb", 0.9), ("a100-40gb", 0.95)])
def test_left_out_rows_are_within_15_percent(device: str, share: float) -> None:
    ratios = np.array([ratio for _, ratio in left_out(device)])
    assert np.mean(abs(ratios - 1) <= 0.15) >= share
    assert abs(np.exp(np.log(ratios).mean()) - 1) < 0.03, "neither too fast nor too slow over all"
    rates = find_efficiency(device)
    assert 0.85 <= np.mean((rates.low - 1e-3 <= ratios) & (ratios <= rates.high + 1e-3)) <= 0.97


def test_h100_utilization_correlates_with_published_rows() -> None:
    """With a single efficiency for all work, utilizations would be almost uncorrelated."""
    rows, ratios = zip(*left_out("h100", "bfloat16"), strict=True)
    measured = np.array([row.measured * row.workload.model_flops / row.length for row in rows])
    one = DeviceEfficiency(0.73, 0.73, 0.73)
    single = measured * [row.simulated(one) / row.measured for row in rows]
    apart = np.corrcoef(measured * ratios, measured)[0, 1]
    print(f"correlation {apart:.2f}, with one efficiency {np.corrcoef(single, measured)[0, 1]:.2f}")
    assert apart > 0.5 > 0.3 > np.corrcoef(single, measured)[0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("device", FITTED)
def test_stored_fits_are_reproduced_from_their_rows(device: str) -> None:
    for fold, judged in fitted_devices()[device]["left_out"].items():
        rates = fit([row for row in ROWS if row.device == device and row.fold != int(fold)])
        assert [getattr(rates, name) for name in PARAMETERS] == pytest.approx(
            [*judged["efficiency"].values()], abs=2e-3
        )


def test_unpublished_devices_have_a_wider_interval() -> None:
    known, unknown = find_efficiency("h100"), find_efficiency("mi300x")
    assert math.log(unknown.high / unknown.low) > 2 * math.log(known.high / known.low)
    assert "no published run on mi300x" in unknown.basis and set(FITTED) < set(DEVICES)
