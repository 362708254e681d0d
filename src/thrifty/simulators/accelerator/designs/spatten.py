"""SpAtten (Wang et al. 2021): drop unimportant tokens for all later layers and skip small values.

Paper       Wang et al. 2021, SpAtten: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning
            (HPCA 2021), tables 1 and 2. All sizes are from the paper.
Promise     Dropped tokens are neither fetched nor computed. Values with small attention weights are skipped.
Use         thrifty.trace("diagonal", "trace.safetensors", density=0.2, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["spatten"], measure=False)
Start with  `spatten`, with `filters=["own"]` on a recorded trace. `equal_resources={"multipliers": 128}` is the
            paper's version with an eighth of the multipliers.
Cost        All scores among the remaining tokens are computed. Queries with flat attention are scored twice.
Avoid       Masks of scattered pairs, because SpAtten then skips only values, not tokens. Use SpAtten's own filter.
Does not    Select tokens; the trace determines them. A key is dropped if no query keeps it; a query is dropped if its
            "alive" count is 0."""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("score", "softmax", "select", "value")


def survivors(layer: AttentionLayer) -> tuple[np.ndarray, np.ndarray]:
    """Return an array (units, queries) with 1 for each remaining query, and the number of remaining keys (units,)."""
    alive = layer.count("alive")
    queries = (layer.kept_counts > 0).astype(np.int64) if alive is None else np.minimum(alive, 1)
    keys = (layer.kept() & (queries > 0)[..., None]).any(1).sum(-1)
    return queries, keys


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per query of a layer. Each item passes the stations for scores, softmax, top-k and values.

    Dropped tokens are known before the layer begins. A key is dropped if no query keeps it. A query is dropped if its
    "alive" count is 0; a trace without "alive" counts drops no queries. All scores among the remaining tokens are
    computed, for any mask. Values are computed for kept pairs.

    Queries and keys are first read with only their high bits. The fraction `again` of the queries also reads the low
    bits and computes scores twice; a trace may record "again" per query. Quick-select over a row of n needs 2·n
    expected comparisons: n / 8 cycles at 16 per cycle.
    """
    width = layer.width
    queries, keys = survivors(layer)
    again = layer.count("again")
    scored = queries * keys[:, None]
    kept = layer.kept_counts * queries
    twice = scored if again is None else scored * (1 + np.minimum(again, 1))
    compared = int(machine.number("comparators"))
    cycles = [
        ceil_div(twice * width, machine.stations["score"].width),
        ceil_div(twice, machine.stations["softmax"].width),
        ceil_div(2 * scored, compared),
        ceil_div(kept * width, machine.stations["value"].width),
    ]
    high, low = machine.number("high_bits"), machine.number("low_bits")
    share = machine.number("again") if again is None else float((again * queries).sum() / max(queries.sum(), 1))
    left = queries.sum(1)
    values = (layer.kept() & (queries > 0)[..., None]).any(1).sum(-1) * width * (high + low) / 8
    return ItemStream(
        service=np.stack(cycles).astype(np.int64),
        macs=float(scored.sum() + kept.sum()) * width,
        read=(left + keys) * width * (high + share * low) / 8 + values,
        written=left * width * (high + low) / 8,
        operations=_operations(machine, width, float(twice.sum()), float(kept.sum()), float(left.sum())),
        notes=_notes(layer, machine, float(scored.sum()), float(kept.sum())),
    )


def _operations(machine: AcceleratorSpec, width: int, scored: float, kept: float, queries: float) -> Operations:
    bits = int(machine.number("high_bits") + machine.number("low_bits"))
    memory = machine.size("operands")
    return add_up(
        multiply_accumulate((scored + kept) * width, bits),
        {PricedOperation("sram", width * bits, memory): scored + kept},
        {PricedOperation("float_multiply", 32): scored, PricedOperation("float_add", 32): scored + queries},
        {PricedOperation("int_add", bits): 3 * scored},  # two comparisons for top-k, one addition for importance
    )


def _notes(layer: AttentionLayer, machine: AcceleratorSpec, scored: float, kept: float) -> tuple[str, ...]:
    notes = []
    if layer.packed is not None and scored > 2 * kept:
        notes.append("SpAtten computes all scores of remaining tokens, so a mask of scattered pairs saves only values")
    most = machine.size("operands") / (layer.width * 12 / 8)
    if layer.keys > most:
        notes.append(f"SpAtten: the memories hold {most:.0f} of {layer.keys} keys; repeated reads are ignored")
    return tuple(notes)


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["score"].width + machine.stations["value"].width


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with all sizes scaled by the same factor, as in the paper's version with an eighth of the
    multipliers.
    """
    share = budget / multipliers(machine)
    stations = {
        name: replace(station, width=max(1, int(station.width * share))) for name, station in machine.stations.items()
    }
    settings = {**machine.settings, "comparators": max(1, int(machine.number("comparators") * share))}
    modules = machine.scaled_modules(dict.fromkeys((*STATIONS, "fetch"), share))
    return replace(machine, stations=stations, settings=settings, modules=modules)


SETTINGS = {"comparators": 16, "high_bits": 8, "low_bits": 4, "again": 0.059}
SIZES = ("comparators", "high_bits", "low_bits")
DESIGN = AcceleratorDesign("spatten", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, lambda machine: 2)
