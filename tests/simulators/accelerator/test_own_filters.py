"""Each design's own filter keeps the requested density of a recorded trace."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_filters import a3_filter
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import simulate
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.design_filters import FILTERS, apply_design_filter
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

ALL = [*FILTERS, "spatten"]


def recorded(layers: int = 4, causal: bool = False) -> AttentionTrace:
    """Return a trace of two examples, one of them padded, in which queries prefer some keys."""
    random, trace_layers = np.random.default_rng(0), []
    mask = np.tril(np.ones((40, 40), dtype=bool))[None, None].repeat(2, 0).repeat(2, 1) if causal else None
    for number in range(layers):
        liked = random.standard_normal((2, 1, 40, 16))
        q, k = (liked + random.standard_normal((2, 2, 40, 16)) for _ in range(2))
        tensors = {"q": q.astype(np.float32), "k": k.astype(np.float32)}
        trace_layers.append(layer_of(f"layer {number}", mask=mask, lengths=[40, 30], **tensors))
    return AttentionTrace("recorded", tuple(trace_layers))


TRACE = recorded()


@pytest.mark.parametrize("design", ALL)
@pytest.mark.parametrize("density", [0.3, 0.6])
def test_every_filter_keeps_the_requested_density(design: str, density: float) -> None:
    result = apply_design_filter(TRACE, design, density)
    # SpAtten spares the first of four layers, a quarter of the pairs; A3 keeps candidates only
    assert result.density == pytest.approx(density, abs=0.08) or (design == "a3" and result.density < density)
    assert 0.2 < float(result.provenance["softmax kept"]) <= 1 and result.provenance["filter"] == design
    assert simulate(find_machine(design), result).cycles > 0


@pytest.mark.parametrize("density", [0.1, 0.3, 0.6, 1.0])
def test_dota_keeps_the_requested_density_of_causal_pairs(density: float) -> None:
    trace = recorded(causal=True)
    for before, after in zip(trace.layers, apply_design_filter(trace, "dota", density).layers, strict=True):
        off = after.kept_counts.sum() - density * before.kept_counts.sum()
        assert abs(off) <= before.unit_queries.sum() / 2  # half a key of each query


def test_a3_keeps_a_key_for_every_query() -> None:
    trace = AttentionTrace("one", (layer_of("0", q=-np.ones((1, 1, 3, 2), "f4"), k=np.ones((1, 1, 3, 2), "f4")),))
    assert apply_design_filter(trace, "a3", 0.5).layers[0].kept_counts.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("design", ["elsa", "sanger", "dota"])
def test_softmax_mass_grows_with_density(design: str) -> None:
    kept = [
        float(apply_design_filter(TRACE, design, density).provenance["softmax kept"]) for density in (0.2, 0.5, 1.0)
    ]
    assert kept == sorted(kept) and kept[2] == pytest.approx(1, abs=1e-3) and kept[0] > 0.2 + 0.05


@pytest.mark.parametrize("design", ALL)
def test_hidden_pairs_are_never_kept(design: str) -> None:
    before = recorded(causal=True)
    after = apply_design_filter(before, design, 0.4)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert not (new.kept() & ~old.kept()).any()


def test_dota_keys_per_query_and_vitcod_masks_are_equal() -> None:
    for layer in apply_design_filter(TRACE, "dota", 0.3).layers:
        assert np.ptp(layer.kept_counts[:2]) == np.ptp(layer.kept_counts[2:, :28]) == 0
    for layer in apply_design_filter(TRACE, "vitcod", 0.5).layers:
        first, second = layer.kept().reshape(2, 2, 40, 40)
        assert ((first & ~second)[:, :30, :30].sum() + (second & ~first).sum()) <= 4  # queries without keys keep one


def test_a3_counts_candidates_and_iterations() -> None:
    result = apply_design_filter(TRACE, "a3", 0.1).layers[0]
    layer = TRACE.layers[0]
    assert layer.q is not None and layer.k is not None
    visible = torch.from_numpy(layer.kept().reshape(2, 2, 40, 40))
    candidates = a3_filter.a3_candidates(torch.from_numpy(layer.q), torch.from_numpy(layer.k), 0.5, visible)
    counted, iterations = result.count("candidates"), result.count("iterations")
    assert counted is not None and iterations is not None
    assert np.array_equal(counted.reshape(2, 2, 40), candidates.sum(-1).numpy())
    assert set(iterations[0].tolist()) == {20} and set(iterations[2].tolist()) == {0, 15}


def test_spatten_drops_tokens_for_all_later_layers() -> None:
    left = [layer.count("alive") for layer in apply_design_filter(TRACE, "spatten", 0.4).layers]
    assert left[0] is not None and left[0].sum() == 2 * (40 + 30)
    for earlier, later in pairwise(left):
        assert earlier is not None and later is not None
        assert (later <= earlier).all() and later.sum() < earlier.sum()


def test_traces_without_operands_are_refused() -> None:
    masks = synthetic_trace("uniform", 0.5, heads=1, tokens=8)
    assert apply_design_filter(masks, "dense", 0.2) is masks
    with pytest.raises(UsageError, match="no queries and keys"):
        apply_design_filter(masks, "elsa", 0.2)
    with pytest.raises(UsageError, match="not in"):
        apply_design_filter(TRACE, "elsa", 0.0)
