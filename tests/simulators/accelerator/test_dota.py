"""DOTA's mechanism as described in the abstract (Qu et al., ASPLOS 2022).

The sizes are unverified, so no published time is compared."""

import numpy as np
import pytest
import torch

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_filters import dota_filter
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.designs.dota import grouped, ordered_fetches, shared_fetches
from thrifty.simulators.accelerator.iso_peak import iso_peak
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

MACHINE = find_machine("dota")


@pytest.mark.parametrize("pattern", ["uniform", "power-law", "diagonal", "balanced"])
def test_fetched_keys_equal_brute_force(pattern: str) -> None:
    kept = synthetic_trace(pattern, 0.2, heads=2, tokens=46).layers[0].kept()
    fetched, one_by_one = shared_fetches(grouped(kept, 4)), ordered_fetches(grouped(kept, 4))
    for unit, mask in enumerate(kept):
        for group, first in enumerate(range(0, 46, 4)):
            sets = [np.flatnonzero(row) for row in mask[first : first + 4]]
            assert fetched[unit, group] == len(set().union(*(set(s.tolist()) for s in sets)))
            steps = range(max(len(keys) for keys in sets))
            assert one_by_one[unit, group] == sum(len({int(k[n]) for k in sets if n < len(k)}) for n in steps)
    assert (fetched <= one_by_one).all() and one_by_one.sum() <= kept.sum()


def test_equal_keys_per_query_balance_the_lanes() -> None:
    even, uneven = (synthetic_trace(pattern, 0.2, heads=2, tokens=64) for pattern in ("balanced", "uniform"))
    assert np.ptp(even.layers[0].kept_counts) == 0 and np.ptp(uneven.layers[0].kept_counts) > 0
    attending = [simulate(MACHINE, trace).stations["attend"].busy for trace in (even, uneven)]
    assert attending[1] > 1.05 * attending[0]
    scores = torch.randn(1, 2, 40, 40, generator=torch.Generator().manual_seed(0))
    keep = dota_filter.keep_of(dota_filter.balanced_keys(scores, 8, torch.ones(1, 2, 40, 40, dtype=torch.bool)), 40)
    assert bool((keep.sum(-1) == 8).all())


def test_cycles_of_a_group_by_hand_calculation() -> None:
    trace = synthetic_trace("balanced", 0.25, heads=1, tokens=64)
    result = simulate(MACHINE, trace)
    # 16 groups: 13 of 64 dims detected for 64 keys by 512 · 16 products, 16 keys of 2 · 64 products by 512 a lane
    assert result.stations["attend"].busy == 16 * (-(-64 * 13 // (512 * 16)) + 2 * 16 * 64 // 512)
    dense = simulate(MACHINE.replaced("approximate", False), trace)
    assert dense.stations["attend"].busy == 16 * (2 * 64 * 64 // 512) and dense.layers[0].macs == 2 * 64 * 64 * 64


def test_reordered_fetches_are_never_slower() -> None:
    trace = synthetic_trace("power-law", 0.2, heads=2, tokens=64)
    shared, ordered = (simulate(MACHINE.replaced("reordered", value), trace) for value in (True, False))
    assert shared.stations["fetch"].busy < ordered.stations["fetch"].busy and shared.cycles <= ordered.cycles


def test_equal_peak_ratio_is_the_product_of_its_factors() -> None:
    """The product of the factors equals the ratio of times at the same multipliers and clock."""
    trace = synthetic_trace("balanced", 0.1, heads=4, tokens=128)
    gpu = find_machine("v100")
    results = simulate(MACHINE, trace), simulate(gpu, trace)
    factors = iso_peak(*results)
    peaks = [result.multipliers * result.machine.clock for result in results]
    assert factors.ratio == pytest.approx(results[1].seconds / results[0].seconds * peaks[1] / peaks[0])
    assert factors.omitted == pytest.approx(128 / 13)
    assert factors.utilisation == results[0].utilisation < 1


def test_budgets_change_lanes_and_copies() -> None:
    assert limit_resources(MACHINE, multipliers=128).settings["lane"] == 32
    assert limit_resources(MACHINE, multipliers=4096).copies == 2
    with pytest.raises(UsageError, match="at least 4"):
        limit_resources(MACHINE, multipliers=3)
