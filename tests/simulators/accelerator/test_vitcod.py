"""ViTCoD's mechanism, and the released simulator's rule for linear layers (You et al., HPCA 2023)."""

import numpy as np
import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.designs.vitcod import released_linear_cycles, shared_lines, split_pairs
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

MACHINE = find_machine("vitcod")


def test_cycles_of_linear_layers_equal_the_released_log() -> None:
    projections, rest = released_linear_cycles(197, heads=3, layers=12)
    assert (projections, rest, projections + rest) == (681_492, 1_361_664, 2_043_156)


def test_column_split_and_line_shares_equal_plain_loops() -> None:
    kept = synthetic_trace("power-law", 0.2, heads=3, tokens=150).layers[0].kept()
    dense, sparse = split_pairs(kept, 50)
    for unit, mask in enumerate(kept):
        columns = [int(mask[:, column].sum()) for column in range(150)]
        assert dense[unit] == sum(count > 50 for count in columns) > 0
        assert sparse[unit] == sum(count for count in columns if count <= 50)
    lines = shared_lines(np.array([0, 1, 500, 10_000]), np.array([9, 10_000, 500, 0]), 64)
    assert lines.tolist() == [0, 1, 32, 64]


def test_lines_are_balanced_between_both_parts() -> None:
    result = simulate(MACHINE, synthetic_trace("power-law", 0.1, heads=3, tokens=197))
    layer = result.layers[0]
    assert layer.macs <= result.multipliers * result.stations["lines"].busy
    assert result.utilisation > 0.5


def test_coding_saves_bytes_and_costs_cycles() -> None:
    trace = synthetic_trace("diagonal", 0.1, heads=4, tokens=128)
    coded, plain = (simulate(MACHINE.replaced("coded", value), trace).layers[0] for value in (True, False))
    assert plain.read - coded.read == 4 * (2 * 128) * 64 / 2
    assert coded.stations["lines"].busy - plain.stations["lines"].busy == 4 * -(-2 * 128 * 64 * 2 // 512)


def test_a_budget_reduces_the_lines() -> None:
    assert limit_resources(MACHINE, multipliers=128).stations["lines"].width == 16
    with pytest.raises(UsageError, match="at least 16"):
        limit_resources(MACHINE, multipliers=8)
