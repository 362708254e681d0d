"""SpAtten (Wang et al., HPCA 2021): its sizes, and what is gained by tokens that are dropped whole."""

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
    """Of all tokens the first `left`; dropped queries keep one pair, which a trace needs and "alive" takes back."""
    mask = np.zeros((1, heads, tokens, tokens), dtype=bool)
    mask[..., :left, :left] = True
    mask[..., left:, 0] = True
    alive = np.zeros((1, heads, tokens), dtype=np.int64)
    alive[..., :left] = 1
    return trace_of(mask, alive=alive)


def test_power_and_area_of_the_modules_are_those_of_the_table() -> None:
    area = {"scores": 7.123, "softmax": 0.791, "top-k": 0.498, "values": 7.222, "fetcher": 2.649, "other": 0.43}
    assert MACHINE.area == pytest.approx(sum(area.values())) == pytest.approx(18.71, abs=0.01)
    assert sum(module.dynamic for module in MACHINE.modules.values()) == pytest.approx(1.36 + 1.24, abs=0.01)


def test_peak_is_2_tera_operations_a_second_and_a_dense_layer_nearly_reaches_it() -> None:
    found = simulate(replace(MACHINE, memories={"operands": MACHINE.memories["operands"]}),
                     synthetic_trace("uniform", 1.0, heads=2, tokens=384))  # fmt: skip
    assert 2 * found.multipliers * MACHINE.clock == 2.048e12
    assert 0.95 < found.utilisation <= 1


def test_dropped_tokens_are_the_shorter_layer_that_is_left() -> None:
    pruned, short = dropped(96, 48), trace_of(np.ones((1, 2, 48, 48), dtype=bool))
    found = [simulate(MACHINE, trace).layers[0] for trace in (pruned, short)]
    assert found[0].cycles == found[1].cycles and found[0].macs == found[1].macs
    assert (found[0].read, found[0].written) == (found[1].read, found[1].written)
    queries, keys = survivors(pruned.layers[0])
    assert queries.sum(1).tolist() == keys.tolist() == [48, 48]


def test_scattered_pairs_are_computed_all_the_same_but_for_their_values() -> None:
    dense, scattered = (simulate(MACHINE, synthetic_trace("uniform", d, heads=2, tokens=64)) for d in (1.0, 0.2))
    assert scattered.stations["score"].busy == dense.stations["score"].busy
    assert scattered.stations["value"].busy < dense.stations["value"].busy / 3
    assert any("all remaining tokens" in note for note in scattered.notes) and not dense.notes


def test_a_dropped_head_takes_nothing() -> None:
    mask = np.ones((1, 2, 16, 16), dtype=bool)
    alive = np.ones((1, 2, 16), dtype=np.int64)
    alive[0, 1] = 0
    both, one = simulate(MACHINE, trace_of(mask)).layers[0], simulate(MACHINE, trace_of(mask, alive=alive)).layers[0]
    assert one.macs == both.macs / 2 and one.read == both.read / 2


def test_flat_queries_are_computed_twice_and_bring_their_low_bits() -> None:
    mask = np.ones((1, 1, 32, 32), dtype=bool)
    layers = [simulate(MACHINE, trace_of(mask, again=np.full((1, 1, 32), value))).layers[0] for value in (0, 1)]
    assert layers[1].stations["score"].busy == 2 * layers[0].stations["score"].busy
    assert layers[1].read - layers[0].read == 2 * 32 * 64 * 4 / 8


def test_an_eighth_as_in_table_3() -> None:
    eighth = limit_resources(MACHINE, multipliers=128, bandwidth=64e9)
    assert eighth.stations["score"].width == eighth.stations["value"].width == 64
    assert eighth.stations["softmax"].width == 1 and eighth.settings["comparators"] == 2
    with pytest.raises(UsageError, match="give at least 2"):
        limit_resources(MACHINE, multipliers=1)
