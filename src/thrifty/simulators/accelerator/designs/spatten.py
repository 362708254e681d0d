"""SpAtten: tokens and heads that matter little are dropped for good, and values of small weights are not fetched (Wang
et al., HPCA 2021).

A query at a time goes through scores, softmax, a top-k of its own weights and the product with values. What is dropped
is known before a layer begins, and whole: keys that no query keeps are taken for dropped, and so are queries for which
a trace counts no "alive" (all are where it does not count them). Among what is left every score is computed, whatever
the mask says of single pairs; values are computed by the pairs that are kept. So masks of scattered pairs are of little
use to it, and those of its own filter are what it was built for.

Queries and keys come in with their high bits, and with the low ones for the share `again` of the queries, whose scores
are then computed twice; a trace may count "again" for each query. Sizes are the paper's; the quick-select engine goes
through a row of n in n / 8 cycles, which is twice the n that it expects to compare, 16 a cycle.
"""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("score", "softmax", "select", "value")


def survivors(layer: AttentionLayer) -> tuple[np.ndarray, np.ndarray]:
    """(u, t) 1 for queries that are left, and (u,) how many keys are."""
    alive = layer.count("alive")
    queries = (layer.kept_counts > 0).astype(np.int64) if alive is None else np.minimum(alive, 1)
    keys = (layer.kept() & (queries > 0)[..., None]).any(1).sum(-1)
    return queries, keys


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
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
        {PricedOperation("int_add", bits): 3 * scored},  # two expected comparisons of a top-k, and importance added up
    )


def _notes(layer: AttentionLayer, machine: AcceleratorSpec, scored: float, kept: float) -> tuple[str, ...]:
    notes = []
    if layer.packed is not None and scored > 2 * kept:
        notes.append(
            "SpAtten computes the scores of all tokens that are left: single pairs are of use to it in values only"
        )
    most = machine.size("operands") / (layer.width * 12 / 8)
    if layer.keys > most:
        notes.append(f"SpAtten's memories hold {most:.0f} keys: they would be read again for {layer.keys}")
    return tuple(notes)


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["score"].width + machine.stations["value"].width


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Everything in proportion, as the paper does for an eighth."""
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
