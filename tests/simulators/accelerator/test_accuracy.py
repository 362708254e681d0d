"""Errors of masks equal plain loops: softmax mass, output error, and masks within an allowed error."""

import numpy as np
import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import simulate
from thrifty.simulators.accelerator.attention_error import attention_cost, computed_pairs
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.design_filters import EXACT, SELECTIVE, apply_design_filter, filter_within_error
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace


def recorded(values: bool = True) -> AttentionTrace:
    """Return a causal trace of two layers and two examples of different length, in which queries prefer some keys."""
    random, layers = np.random.default_rng(0), []
    mask = np.tril(np.ones((24, 24), dtype=bool))[None, None].repeat(2, 0).repeat(2, 1)
    for number in range(2):
        liked = random.standard_normal((2, 1, 24, 8))
        q, k, v = (2 * (liked + random.standard_normal((2, 2, 24, 8))).astype(np.float32) for _ in range(3))
        layers.append(layer_of(f"layer {number}", mask=mask, lengths=[24, 17], q=q, k=k, v=v if values else None))
    return AttentionTrace("recorded", tuple(layers))


TRACE = recorded()


def by_loops(before: AttentionTrace, after: AttentionTrace) -> tuple[float, float]:
    shares, wrong, whole = [], 0.0, 0.0
    for old, new in zip(before.layers, after.layers, strict=True):
        seen, kept = computed_pairs(old), computed_pairs(new)
        for e, h, t in np.ndindex(*seen.shape[:3]):
            if not seen[e, h, t].any():
                continue
            weights = np.exp(old.q[e, h, t].astype(float) @ old.k[e, h].T / 8**0.5)
            exact = weights * seen[e, h, t]
            left = weights * kept[e, h, t]
            shares.append(left.sum() / exact.sum())
            output = exact @ old.v[e, h] / exact.sum()
            wrong += ((left @ old.v[e, h] / max(left.sum(), 1e-300) - output) ** 2).sum()
            whole += (output**2).sum()
    return float(np.mean(shares)), (wrong / whole) ** 0.5


@pytest.mark.parametrize("design", ["elsa", "sanger", "spatten"])
def test_errors_equal_plain_loops(design: str) -> None:
    after = apply_design_filter(TRACE, design, 0.4)
    cost, (share, error) = attention_cost(TRACE, after), by_loops(TRACE, after)
    assert cost.softmax_kept == pytest.approx(share, abs=1e-5) and cost.output_error == pytest.approx(error, abs=1e-5)
    assert after.provenance["softmax kept"] == f"{cost.softmax_kept:.4f}"
    assert after.provenance["output error"] == f"{cost.output_error:.4f}"


def test_errors_of_all_pairs_and_of_dropped_tokens() -> None:
    nothing = attention_cost(TRACE, TRACE)
    assert nothing.softmax_kept == pytest.approx(1) and nothing.output_error == pytest.approx(0, abs=1e-6)
    gone = {"alive": np.zeros((2, 2, 24), dtype=np.int64)}
    layers = tuple(layer.masked(layer.kept().reshape(2, 2, 24, 24), gone) for layer in TRACE.layers)
    cost = attention_cost(TRACE, AttentionTrace("gone", layers))
    assert (cost.softmax_kept, cost.output_error) == (0, 1)


def test_exact_scores_keep_the_most_softmax_mass() -> None:
    best = float(apply_design_filter(TRACE, EXACT, 0.3).provenance["softmax kept"])
    for design in SELECTIVE:
        result = apply_design_filter(TRACE, design, 0.3)
        if result.density <= 0.31 * TRACE.density:
            assert float(result.provenance["softmax kept"]) <= best + 1e-4


@pytest.mark.parametrize("design", [*SELECTIVE, EXACT])
def test_lowest_density_within_an_error(design: str) -> None:
    result = filter_within_error(TRACE, design, 0.25)
    assert float(result.provenance["output error"]) <= 0.25 and result.provenance["error allowed"] == "0.25"
    assert result.provenance["within allowed"] == "yes"
    less = 0.0
    for hundredths in range(5, 101, 5):
        tried = apply_design_filter(TRACE, design, hundredths / 100)
        if float(tried.provenance["output error"]) <= 0.25:
            break
        less = tried.density
    assert less <= result.density <= tried.density


def test_an_error_is_compared_without_rounding() -> None:
    errors = [
        attention_cost(TRACE, apply_design_filter(TRACE, EXACT, density)).output_error
        for density in (0.2, 0.3, 0.4, 0.5)
    ]
    exceeded = [error for error in errors if float(f"{error:.4f}") > error]
    assert exceeded and all(
        filter_within_error(TRACE, EXACT, e).provenance["within allowed"] == "yes" for e in exceeded
    )


def test_a3_search_doubles_if_candidates_are_too_few() -> None:
    few, many = (apply_design_filter(TRACE, "a3", density).layers[0] for density in (0.1, 0.6))
    assert many.count("iterations").max() > few.count("iterations").max() == 12
    assert many.kept_counts.sum() > 1.5 * few.kept_counts.sum()
    notes = [simulate(find_machine("a3"), AttentionTrace("a", (layer,))).notes for layer in (few, many)]
    assert ["iterations per key" in " ".join(each) for each in notes] == [False, True]


def test_missing_operands_and_invalid_errors_are_refused() -> None:
    masks = synthetic_trace("uniform", 0.5, heads=1, tokens=8)
    with pytest.raises(UsageError, match="no queries and keys"):
        attention_cost(masks, masks)
    with pytest.raises(UsageError, match="has no values"):
        filter_within_error(recorded(values=False), "elsa", 0.1)
    assert "output error" not in apply_design_filter(recorded(values=False), "elsa", 0.5).provenance
    for error in (0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match=r"not in \(0, 1\)"):
            filter_within_error(TRACE, "elsa", error)
    assert filter_within_error(masks, "dense", 0.1) is masks
