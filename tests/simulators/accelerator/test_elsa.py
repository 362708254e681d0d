"""ELSA's published cycles and energy at the published kept fractions (Ham et al., ISCA 2021).

The paper prints kept fractions, but no masks. Masks with runs of neighboring keys load banks almost evenly. Masks with
independent pairs load banks unevenly. Published values should be between both. Bars are digitized, grade P."""

import numpy as np
import pytest

from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.designs.elsa import bank_counts, hash_multiplications, preprocessing_cycles
from thrifty.simulators.accelerator.simulation_result import SimulationResult
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

ELSA = find_machine("elsa")
BASE = ELSA.replaced("approximate", False)

PUBLISHED = {
    # workload: mean length, speedup of the base over a V100, energy ratio of the base; in conservative mode: kept
    # fraction (figure 10, at the largest measured p that loses at most 1 %), latency over ideal without and with
    # preprocessing (figure 11b), energy ratio (figure 13a)
    "BERT SQuAD1.1": (206, 27.3, 616, 0.274, 0.302, 0.362, 1833),
    "BERT SQuAD2": (212, 26.0, 587, 0.234, 0.268, 0.326, 1988),
    "BERT RACE": (383, 7.7, 175, 0.375, 0.399, 0.432, 412),
    "RoBERTa SQuAD1.1": (251, 18.0, 406, 0.278, 0.316, 0.365, 1202),
    "RoBERTa SQuAD2": (258, 17.1, 386, 0.337, 0.371, 0.419, 981),
    "RoBERTa IMDB": (334, 14.0, 317, 0.240, 0.275, 0.312, 1084),
    "ALBERT SQuAD1.1": (212, 42.5, 960, 0.322, 0.353, 0.411, 2503),
    "ALBERT RACE": (383, 12.2, 277, 0.398, 0.391, 0.423, 654),
}
"""Published bars by workload. SASRec is omitted: figure 10 keeps 0.577 and 0.424 of the pairs for a loss of at most
0.5 %, but its bar of 0.243 is faster than the banks allow."""
MODERATE = {
    # kept fraction, latency without preprocessing, energy ratio at the largest measured p that loses at most 2.5 %.
    # Omitted because their p was not measured: BERT RACE (0.235; p = 2 keeps 0.271) and IMDB (0.221; p = 4 keeps 0.240
    # and loses 0.7 %).
    "BERT SQuAD1.1": (0.175, 0.198, 2913),
    "BERT SQuAD2": (0.144, 0.176, 3207),
    "RoBERTa SQuAD1.1": (0.207, 0.251, 1533),
    "RoBERTa SQuAD2": (0.265, 0.281, 1294),
    "ALBERT SQuAD1.1": (0.245, 0.251, 3539),
    "ALBERT RACE": (0.273, 0.283, 887),
}
AGGRESSIVE = {"RoBERTa SQuAD2": (0.195, 0.238), "ALBERT SQuAD1.1": (0.177, 0.216)}
"""Kept fraction and latency at p = 4, if the workload then loses nearly 5 %. Other workloads had a larger p."""


def ideal(queries: int) -> float:
    """Return the cycles of 528 multipliers that are always busy, for 2·n²·d multiplications."""
    return 2 * queries**2 * 64 / 528


def ran(pattern: str, density: float, tokens: int) -> SimulationResult:
    return simulate(ELSA, synthetic_trace(pattern, density, heads=2, tokens=tokens))


def execution(result: SimulationResult, tokens: int) -> float:
    """Return the latency relative to the ideal accelerator, without preprocessing."""
    return (result.cycles / 2 - 3 * (tokens + 1)) / ideal(tokens)


def ratio_to_gpu(result: SimulationResult, speedup: float, tokens: int) -> float:
    """Return the energy of a GPU at 250 W, divided by the energy of twelve accelerators. `speedup` is of the base."""
    base = simulate(BASE, synthetic_trace("uniform", 0.5, heads=2, tokens=tokens))
    energy = result.energy("activity")
    assert energy is not None
    return 250 * speedup * base.seconds / 12 / energy.total


def test_base_latency_of_figure_11() -> None:
    result = simulate(BASE, synthetic_trace("uniform", 0.3, heads=1, tokens=512))
    assert result.cycles / ideal(512) == pytest.approx(1.031, abs=0.002)
    assert result.multipliers + BASE.stations["divide"].width == 528


def test_preprocessing_cycles_of_section_iv() -> None:
    assert hash_multiplications(64) == 768
    assert preprocessing_cycles(np.array([64, 206, 512]), 64, 256).tolist() == [195, 621, 1539]


def test_preprocessing_bars_follow_from_lengths() -> None:
    for tokens, *_, alone, total, _ in PUBLISHED.values():
        assert 3 * (tokens + 1) / ideal(tokens) == pytest.approx(total - alone, abs=0.002)


@pytest.mark.parametrize("workload", PUBLISHED)
def test_conservative_bars_of_figure_11b_and_13a(workload: str) -> None:
    tokens, speedup, _, density, alone, total, energy = PUBLISHED[workload]
    even, uneven = ran("runs", density, tokens), ran("uniform", density, tokens)
    assert execution(even, tokens) == pytest.approx(alone, rel=0.15)
    assert even.cycles / 2 / ideal(tokens) == pytest.approx(total, rel=0.15)
    assert ratio_to_gpu(even, speedup, tokens) == pytest.approx(energy, rel=0.07)
    if workload != "ALBERT RACE":  # 0.391 is below the latency of balanced banks at 0.398, so its p was above 0.5
        assert execution(even, tokens) < alone < execution(uneven, tokens)


@pytest.mark.parametrize("workload", MODERATE)
def test_moderate_bars_of_figure_11b_and_13a(workload: str) -> None:
    tokens, speedup, *_ = PUBLISHED[workload]
    density, alone, energy = MODERATE[workload]
    even = ran("runs", density, tokens)
    assert execution(even, tokens) == pytest.approx(alone, rel=0.15)
    assert ratio_to_gpu(even, speedup, tokens) == pytest.approx(energy, rel=0.17)


@pytest.mark.parametrize("workload", AGGRESSIVE)
def test_aggressive_bars_of_figure_11b(workload: str) -> None:
    tokens, (density, alone) = PUBLISHED[workload][0], AGGRESSIVE[workload]
    assert execution(ran("runs", density, tokens), tokens) == pytest.approx(alone, rel=0.15)


@pytest.mark.parametrize("workload", PUBLISHED)
def test_base_energy_bars_of_figure_13a(workload: str) -> None:
    tokens, speedup, published, *_ = PUBLISHED[workload]
    base = simulate(BASE, synthetic_trace("uniform", 0.5, heads=2, tokens=tokens))
    assert ratio_to_gpu(base, speedup, tokens) == pytest.approx(published, rel=0.02)


def test_base_energy_ratio_at_the_published_mean_speedup() -> None:
    base = simulate(BASE, synthetic_trace("uniform", 0.5, heads=4, tokens=512))
    energy = base.energy("activity")
    assert energy is not None
    watts = energy.total / base.seconds
    assert 12 * watts == pytest.approx(11.07, rel=0.01)
    assert 250 / (12 * watts) * 19.6 == pytest.approx(442, rel=0.02)


def test_geometric_mean_of_conservative_latency() -> None:
    rows = PUBLISHED.values()
    ours = [ran("runs", row[3], row[0]).cycles / 2 / ideal(row[0]) for row in rows]
    assert np.exp(np.log(ours).mean()) == pytest.approx(np.exp(np.log([row[5] for row in rows]).mean()), abs=0.02)


def test_the_slowest_module_sets_the_cycles_of_a_query() -> None:
    """8 keys in 4 banks. The kept keys of a query are first in one bank, then spread over banks."""
    mask = np.zeros((1, 1, 2, 8), bool)
    mask[0, 0, 0, [1, 5]] = True
    mask[0, 0, 1, [0, 1, 2, 3]] = True
    assert bank_counts(mask[0], 4).tolist() == [[[0, 2, 0, 0], [1, 1, 1, 1]]]
    trace = AttentionTrace("by hand", (layer_of("one", mask=mask),))
    # hashing 8 keys and a query 27; attention 2 and 1, division 4 and 4
    assert simulate(ELSA, trace).cycles == 27 + max(2 + 4, 3 + 1) + 4


@pytest.mark.parametrize("density", [0.02, 0.2, 0.9])
@pytest.mark.parametrize("banks", [1, 3, 4])
def test_bank_counts_equal_plain_loops(density: float, banks: int) -> None:
    kept = synthetic_trace("uniform", density, heads=2, tokens=21).layers[0].kept()
    counted = bank_counts(kept, banks)
    for u, t, bank in np.ndindex(*counted.shape):
        assert counted[u, t, bank] == sum(kept[u, t, key] for key in range(21) if key % banks == bank)


def test_budgets_change_banks_or_copies() -> None:
    small, large = limit_resources(ELSA, multipliers=128), limit_resources(ELSA, multipliers=6144)
    assert (small.stations["attend"].width, small.stations["hash"].width, small.copies) == (1, 64, 1)
    assert large.copies == 12 and large.stations == ELSA.stations
    trace = synthetic_trace("uniform", 0.3, heads=12, tokens=96)
    one, twelve = simulate(ELSA, trace), simulate(large, trace)
    assert twelve.multipliers == 12 * one.multipliers and one.cycles / 13 < twelve.cycles < one.cycles / 11
    dynamic = one.energy("activity"), twelve.energy("activity")
    assert dynamic[0] is not None and dynamic[1] is not None
    assert dynamic[1].total == pytest.approx(dynamic[0].total, rel=0.05)
    assert small.modules["attention"].area == ELSA.modules["attention"].area / 4
    assert small.modules["key and value memory"].area == ELSA.modules["key and value memory"].area
