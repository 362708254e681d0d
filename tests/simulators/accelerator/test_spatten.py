"""SpAtten's sizes, and the savings from dropped tokens (Wang et al., HPCA 2021)."""

from dataclasses import replace

import numpy as np
import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.designs.spatten import survivors
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

MACHINE = find_machine("spatten")


def trace_of(mask: np.ndarray, **counts: np.ndarray) -> AttentionTrace:
    return AttentionTrace("t", (layer_of("l", mask=mask, counts=counts),))


def dropped(tokens: int, left: int, heads: int = 2) -> AttentionTrace:
    """Return a trace that keeps the first `left` tokens. Dropped queries keep one pair; their "alive" count is 0."""
    mask = np.zeros((1, heads, tokens, tokens), dtype=bool)
    mask[..., :left, :left] = True
    mask[..., left:, 0] = True
    alive = np.zeros((1, heads, tokens), dtype=np.int64)
    alive[..., :left] = 1
    return trace_of(mask, alive=alive)


def test_area_and_power_of_table_1() -> None:
    area = {"scores": 7.123, "softmax": 0.791, "top-k": 0.498, "values": 7.222, "fetcher": 2.649, "other": 0.43}
    assert MACHINE.area == pytest.approx(sum(area.values())) == pytest.approx(18.71, abs=0.01)
    assert sum(module.dynamic for module in MACHINE.modules.values()) == pytest.approx(1.36 + 1.24, abs=0.01)


def test_a_dense_layer_nearly_reaches_the_peak() -> None:
    result = simulate(replace(MACHINE, memories={"operands": MACHINE.memories["operands"]}),
                     synthetic_trace("uniform", 1.0, heads=2, tokens=384))  # fmt: skip
    assert 2 * result.multipliers * MACHINE.clock == 2.048e12
    assert 0.95 < result.utilisation <= 1


def test_dropping_tokens_equals_a_shorter_layer() -> None:
    pruned, short = dropped(96, 48), trace_of(np.ones((1, 2, 48, 48), dtype=bool))
    result = [simulate(MACHINE, trace).layers[0] for trace in (pruned, short)]
    assert result[0].cycles == result[1].cycles and result[0].macs == result[1].macs
    assert (result[0].read, result[0].written) == (result[1].read, result[1].written)
    queries, keys = survivors(pruned.layers[0])
    assert queries.sum(1).tolist() == keys.tolist() == [48, 48]


def test_scattered_masks_save_only_values() -> None:
    dense, scattered = (simulate(MACHINE, synthetic_trace("uniform", d, heads=2, tokens=64)) for d in (1.0, 0.2))
    assert scattered.stations["score"].busy == dense.stations["score"].busy
    assert scattered.stations["value"].busy < dense.stations["value"].busy / 3
    assert any("scores of remaining tokens" in note for note in scattered.notes) and not dense.notes


def test_dropped_heads_cost_nothing() -> None:
    mask = np.ones((1, 2, 16, 16), dtype=bool)
    alive = np.ones((1, 2, 16), dtype=np.int64)
    alive[0, 1] = 0
    both, one = simulate(MACHINE, trace_of(mask)).layers[0], simulate(MACHINE, trace_of(mask, alive=alive)).layers[0]
    assert one.macs == both.macs / 2 and one.read == both.read / 2


def test_flat_queries_are_computed_twice() -> None:
    mask = np.ones((1, 1, 32, 32), dtype=bool)
    layers = [simulate(MACHINE, trace_of(mask, again=np.full((1, 1, 32), value))).layers[0] for value in (0, 1)]
    assert layers[1].stations["score"].busy == 2 * layers[0].stations["score"].busy
    assert layers[1].read - layers[0].read == 2 * 32 * 64 * 4 / 8


def test_an_eighth_of_the_size_as_in_table_3() -> None:
    eighth = limit_resources(MACHINE, multipliers=128, bandwidth=64e9)
    assert eighth.stations["score"].width == eighth.stations["value"].width == 64
    assert eighth.stations["softmax"].width == 1 and eighth.settings["comparators"] == 2
    with pytest.raises(UsageError, match="at least 2"):
        limit_resources(MACHINE, multipliers=1)
