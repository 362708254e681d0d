"""Traces of attention layers: round trips through files, and refusal of invalid layers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of, packed, unpacked
from thrifty.simulators.accelerator.synthetic_traces import PATTERNS, synthetic_trace
from thrifty.simulators.accelerator.trace_file import FORMAT, load_pruned_masks, load_trace, save_trace, with_dtype

RANDOM = np.random.default_rng(0)


def whole_layer() -> dict:
    q, k, v = RANDOM.normal(size=(3, 2, 3, 5, 4)).astype(np.float32)
    mask = RANDOM.random((2, 3, 5, 5)) < 0.5
    mask[..., 0] = True
    return {"q": q, "k": k, "v": v, "mask": mask, "lengths": [5, 3], "counts": {"candidates": mask.sum(-1)}}


def test_traces_round_trip_through_files(tmp_path: Path) -> None:
    given = whole_layer()
    layer = layer_of("first", **given, bits=8)
    save_trace(
        AttentionTrace("some", (layer, layer_of("second", mask=given["mask"])), {"model": "mine"}), tmp_path / "t"
    )
    result = load_trace(tmp_path / "t")
    assert (result.name, result.provenance) == ("some", {"model": "mine"})
    again = result.layers[0]
    for name in ("q", "k", "v", "packed", "query_lengths", "key_lengths", "kept_counts"):
        assert np.array_equal(getattr(again, name), getattr(layer, name)), name
    assert np.array_equal(again.counts["candidates"], layer.counts["candidates"])
    assert (again.bits, again.width) == (8, 4)
    assert result.layers[1].heads == 3 and result.layers[1].q is None


def test_kept_pairs_exclude_padding() -> None:
    given = whole_layer()
    layer = layer_of("one", **given)
    kept = layer.kept().reshape(2, 3, 5, 5)
    for e, h, t, s in np.ndindex(2, 3, 5, 5):
        length = given["lengths"][e]
        assert kept[e, h, t, s] == (given["mask"][e, h, t, s] and t < length and s < length)
    assert np.array_equal(layer.kept_counts, layer.kept().sum(-1))
    plain = layer_of("all", q=given["q"], k=given["k"], lengths=[5, 3])
    assert np.array_equal(plain.kept_counts, plain.kept().sum(-1)) and plain.density == 1.0


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_masks_are_packed_eight_to_a_byte(keys: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((2, 3, keys)) < 0.5
    assert packed(mask).nbytes == 6 * -(-keys // 8)
    assert np.array_equal(unpacked(packed(mask), keys), mask)


def broken(**changes: object) -> dict:
    return {**whole_layer(), **changes}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (broken(q=np.full((2, 3, 5, 4), np.nan, np.float32)), r"q is nan at \(0, 0, 0, 0\)"),
        (broken(v=np.full((2, 3, 5, 4), np.inf, np.float32)), "v is inf at"),
        (broken(k=np.zeros((2, 3, 4, 4), np.float32)), "k has shape .*expected.*\n.*pad all examples"),
        (broken(v=np.zeros((2, 2, 5, 4), np.float32)), "v has shape "),
        (broken(lengths=[5, 6]), "query_lengths are 5 to 6.*\n.*from 1 to 5"),
        (broken(lengths=[0, 5]), "query_lengths are 0 to 5"),
        (broken(lengths=[5]), r"query_lengths has shape \(1,\), expected \(2,\)"),
        (broken(mask=np.zeros((2, 3, 5, 5), bool)), "keeps no key for query 0 of head 0, example 0 .24 queries"),
        (broken(mask=np.zeros((2, 3, 5, 5))), "not boolean"),
        (broken(counts={"candidates": -np.ones((2, 3, 5), int)}), "counts of 'candidates'"),
        ({"q": np.zeros((2, 3, 5, 4))}, "neither a mask"),
        (broken(q=np.zeros((2, 3, 5, 4), int)), "q has dtype int64.*\n.*floats"),
        (broken(lengths=[4.5, 5.0]), "query_lengths has dtype float64.*\n.*integers"),
        (broken(counts={"candidates": np.zeros((2, 3, 5))}), "counts of 'candidates'.*\n.*integers"),
        (broken(bits=0), "bits is 0.*\n.*at least 1"),
        ({"mask": np.ones((0, 3, 5, 5), bool)}, "examples is 0"),
        ({"mask": np.ones((1, 3, 0, 5), bool)}, "queries is 0"),
        ({"mask": np.ones((1, 1, 5, 5), bool), "width": 0}, "width is 0"),
        ({"mask": np.ones((1, 1, 5, 5), bool), "width": 2.5}, "width is 2.5"),
    ],
)
def test_invalid_layers_are_refused(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layer_of("broken", **given)


def test_padding_rows_may_be_empty() -> None:
    mask = np.ones((1, 1, 4, 4), bool)
    mask[:, :, 2:] = False
    assert layer_of("padded", mask=mask, lengths=[2]).kept_counts.tolist() == [[2, 2, 0, 0]]


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(UsageError, match="there is no trace"):
        load_trace(path)
    path.write_bytes(b"nothing")
    with pytest.raises(IntegrityError, match="cannot be read as a safetensors file"):
        load_trace(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(UsageError, match="not an attention trace"):
        load_trace(path)
    save_file({"x": np.zeros(1)}, path, metadata={"format": FORMAT, "trace": json.dumps({"name": "x", "layers": [{}]})})
    with pytest.raises(IntegrityError, match="lacks"):
        load_trace(path)
    lost = [{"name": "x", "examples": 1, "heads": 1, "queries": 2, "keys": 2, "width": 4, "bits": 16}]
    about = {"name": "x", "layers": lost, "provenance": {}}
    save_file({"x": np.zeros(1)}, path, metadata={"format": FORMAT, "trace": json.dumps(about)})
    with pytest.raises(IntegrityError, match=r"lacks.*0\.query_lengths"):
        load_trace(path)
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(IntegrityError, match="header too large"):
        load_trace(path)
    with pytest.raises(UsageError, match=r"cannot be written.*\n.*existing folder"):
        save_trace(synthetic_trace("uniform", 0.5, tokens=8), tmp_path / "none" / "t.safetensors")
    save_trace(synthetic_trace("uniform", 0.5, tokens=64), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError):
        load_trace(path)
    with pytest.raises(UsageError, match="no layers"):
        AttentionTrace("none", ())


def test_vitcod_files_are_true_for_pruned_pairs(tmp_path: Path) -> None:
    pruned = RANDOM.random((2, 3, 9, 9)) < 0.5
    pruned[..., 0] = False
    np.save(tmp_path / "info.npy", pruned)
    trace = load_pruned_masks(tmp_path / "info.npy")
    assert len(trace.layers) == 2
    assert np.array_equal(trace.layers[1].kept(), ~pruned[1])
    for other in (pruned[0], pruned[..., :8], pruned[:0], pruned[:, :, :0, :0], pruned.astype(int)):
        np.save(tmp_path / "info.npy", other)
        with pytest.raises(UsageError, match="layers, heads, t, t"):
            load_pruned_masks(tmp_path / "info.npy")
    np.save(tmp_path / "info.npy", np.ones((1, 1, 4, 4), bool))
    with pytest.raises(UsageError, match=r"keeps no key for query 0.*\n.*masks are True for kept pairs"):
        load_pruned_masks(tmp_path / "info.npy")
    (tmp_path / "info.npy").write_bytes(b"cut")
    with pytest.raises(UsageError, match="cannot be read"):
        load_pruned_masks(tmp_path / "info.npy")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
def test_patterns_have_their_density_and_seed(pattern: str, density: float) -> None:
    trace = synthetic_trace(pattern, density, heads=3, lengths=[96, 64])
    assert trace.density == pytest.approx(density, abs=0.02)
    assert (trace.layers[0].kept_counts.reshape(2, 3, 96)[1, :, :64] > 0).all()
    again, other = (synthetic_trace(pattern, density, heads=3, lengths=[96, 64], seed=seed) for seed in (0, 1))
    assert np.array_equal(again.layers[0].packed, trace.layers[0].packed)
    if density < 1:
        assert not np.array_equal(other.layers[0].packed, trace.layers[0].packed)


def test_structure_of_patterns() -> None:
    popular, alike = (
        synthetic_trace(pattern, 0.1, heads=1, tokens=128).layers[0].kept()[0].mean(0)
        for pattern in ("power-law", "uniform")
    )
    assert popular.max() > 0.5 > 0.3 > alike.max()
    diagonal = synthetic_trace("diagonal", 0.1, heads=1, tokens=128).layers[0].kept()[0]
    assert diagonal.diagonal().all() and 4 <= diagonal.all(0).sum() <= 8
    near = synthetic_trace("runs", 0.25, heads=4, tokens=128).layers[0].kept()
    assert (near[..., 1:] & near[..., :-1]).sum() > 0.8 * near.sum()


def test_invalid_patterns_and_densities_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'diagonal'"):
        synthetic_trace("diagonl", 0.1)
    with pytest.raises(UsageError, match=r"not in \(0, 1\]"):
        synthetic_trace("uniform", 1.5)
    with pytest.raises(UsageError, match=r"2.4e\+14 pairs exceeds the limit"):
        synthetic_trace("uniform", 0.5, heads=24, tokens=3_162_000)


def test_half_precision_halves_the_size() -> None:
    trace = AttentionTrace("one", (layer_of("one", **whole_layer()),))
    assert with_dtype(trace, "float16").layers[0].q.nbytes * 2 == trace.layers[0].q.nbytes
