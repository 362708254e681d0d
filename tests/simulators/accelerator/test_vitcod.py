"""ViTCoD (You et al., HPCA 2023) against the log that was published with its simulator, and its mechanism.

The log gives for each layer of DeiT-Tiny's mask at 95 % its global tokens and four numbers of cycles. Masks of the same
shape, with as many global tokens and as many other pairs, must give the same.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.designs.vitcod import shared_lines, split_pairs
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace
from thrifty.simulators.accelerator.trace_file import load_pruned_masks
from thrifty.simulators.accelerator.vitcod_released import (
    ReleasedRules,
    attention_cycles,
    fixes,
    head_cycles,
    linear_cycles,
)

MASKS = os.environ.get("THRIFTY_VITCOD_MASKS")
MACHINE = find_machine("vitcod")
TOKENS = 197
LOG = [
    # global tokens; cycles of scores (denser, sparser) and of values (denser, sparser)
    (1, (120, 117), (119, 115)),
    (1, (30, 30), (29, 28)),
    (70, (840, 744), (767, 745)),
    (1, (54, 54), (54, 54)),
    (1, (87, 75), (85, 74)),
    (20, (300, 270), (269, 269)),
    (17, (255, 213), (224, 211)),
    (1, (87, 84), (85, 82)),
    (1, (33, 33), (32, 31)),
    (9, (135, 117), (121, 116)),
    (10, (150, 138), (145, 136)),
    (31, (372, 303), (316, 301)),
]


def other_pairs(dense: int, scores: tuple[int, int], values: tuple[int, int]) -> int:
    """Pairs of the sparser part with which the log's four numbers come out, by their plain formulas."""
    for pairs in range(1, TOKENS * (TOKENS - dense)):
        lines = int(64 * dense * TOKENS / (pairs + dense * TOKENS))
        if not 0 < lines < 64:
            continue
        counted = dense * -(-TOKENS // lines) * 3, -(-pairs // (64 - lines)) * 3
        products = -(-TOKENS * 64 * dense // (lines * 64 // 3)), -(-pairs * 64 // ((64 - lines) * 64 // 3))
        if counted == scores and products == values:
            return pairs
    raise AssertionError((dense, scores, values))


def same_shape() -> AttentionTrace:
    """Three heads of 197 tokens in each of 12 layers; the first head has what the log has, the others hardly any."""
    random, layers = np.random.default_rng(0), []
    for number, (dense, scores, values) in enumerate(LOG):
        mask = np.zeros((1, 3, TOKENS, TOKENS), dtype=bool)
        mask[..., range(TOKENS), range(TOKENS)] = True
        pairs = other_pairs(dense, scores, values)
        first = mask[0, 0]
        first[:] = False
        first[:, random.choice(TOKENS, dense, replace=False)] = True
        rest = np.flatnonzero(~first.any(0))
        filled, each = np.zeros((TOKENS, len(rest)), dtype=bool), -(-pairs // len(rest))
        assert each <= 50
        for place in range(pairs):
            filled[place // len(rest), place % len(rest)] = True
        first[:, rest] = filled
        layers.append(layer_of(f"layer {number}", mask=mask))
    return AttentionTrace("same shape", tuple(layers))


def test_the_published_log_9492_4728_4709() -> None:
    found = attention_cycles(same_shape())
    assert (found.load, found.decode, found.compute, found.total) == (9492, 4728, 4709, 9492)
    for layer, (_, scores, values) in zip(found.layers, LOG, strict=True):
        assert (layer.scores, layer.values) == (max(scores), max(values))


@pytest.mark.skipif(MASKS is None, reason="THRIFTY_VITCOD_MASKS names no info_0.95.npy of ViTCoD's simulator")
def test_the_published_log_of_the_authors_own_masks() -> None:
    trace = load_pruned_masks(Path(MASKS or ""))
    found = attention_cycles(trace)
    assert [int(split_pairs(layer.kept()[:1], 50)[0][0]) for layer in trace.layers] == [dense for dense, *_ in LOG]
    assert (found.load, found.decode, found.compute, found.total) == (9492, 4728, 4709, 9492)


def test_the_earlier_run_of_the_log_reads_values_one_and_a_half_times_11693() -> None:
    found = attention_cycles(same_shape(), ReleasedRules(value_reads=1.5))
    assert (found.load, found.total) == (11693, 11693)


def test_linear_layers_of_the_log_2043156() -> None:
    projections, rest = linear_cycles(TOKENS, heads=3, layers=12)
    assert (projections, rest, projections + rest) == (681_492, 1_361_664, 2_043_156)


def test_each_quirk_set_right_changes_the_count_and_in_the_direction_it_must() -> None:
    found = fixes(same_shape())
    released = found["as released"]
    assert found["every head's own mask"].compute < released.compute  # the other heads have next to nothing
    assert found["overlap within a layer only"].total > released.total
    assert found["transfers share cycles"].load < released.load < found["a GB is 10⁹ bytes"].load + 1
    assert found["64 x 8 multipliers"].compute > 7 * released.compute


def test_a_head_without_global_tokens_brings_queries_in_for_every_other_token() -> None:
    found = head_cycles(100, 3, 0, 500, ReleasedRules())
    assert found.load == 100 + 1 + 100 * 5 + 1 + 2 * 100 and found.decode == 100 + 500
    with pytest.raises(UsageError, match="heads of 64 only"):
        attention_cycles(synthetic_trace("uniform", 0.5, heads=2, tokens=20, width=32))


def test_columns_are_split_and_lines_shared_as_counted_one_by_one() -> None:
    kept = synthetic_trace("power-law", 0.2, heads=3, tokens=150).layers[0].kept()
    dense, sparse = split_pairs(kept, 50)
    for unit, mask in enumerate(kept):
        columns = [int(mask[:, column].sum()) for column in range(150)]
        assert dense[unit] == sum(count > 50 for count in columns) > 0
        assert sparse[unit] == sum(count for count in columns if count <= 50)
    lines = shared_lines(np.array([0, 1, 500, 10_000]), np.array([9, 10_000, 500, 0]), 64)
    assert lines.tolist() == [0, 1, 32, 64]


def test_no_line_computes_more_than_it_can_and_both_parts_end_about_together() -> None:
    found = simulate(MACHINE, synthetic_trace("power-law", 0.1, heads=3, tokens=197))
    layer = found.layers[0]
    assert layer.macs <= found.multipliers * found.stations["lines"].busy
    assert found.utilisation > 0.5


def test_the_code_saves_bytes_and_costs_cycles() -> None:
    trace = synthetic_trace("diagonal", 0.1, heads=4, tokens=128)
    coded, plain = (simulate(MACHINE.replaced("coded", value), trace).layers[0] for value in (True, False))
    assert plain.read - coded.read == 4 * (2 * 128) * 64 / 2
    assert coded.stations["lines"].busy - plain.stations["lines"].busy == 4 * -(-2 * 128 * 64 * 2 // 512)


def test_a_smaller_array() -> None:
    assert limit_resources(MACHINE, multipliers=128).stations["lines"].width == 16
    with pytest.raises(UsageError, match="give at least 16"):
        limit_resources(MACHINE, multipliers=8)
