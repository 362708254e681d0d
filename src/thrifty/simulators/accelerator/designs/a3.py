"""A3 (Ham et al. 2020): search candidate keys greedily, then apply a score threshold.

Paper       Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA 2020),
            table 1 and sections III to V.
Promise     Scores are computed for candidate keys only. Exponentials and outputs are computed for kept keys only.
Use         thrifty.trace("balanced", "trace.safetensors", density=0.1, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["a3", "a3:approximate=false"], measure=False)
Start with  `a3`, the paper's conservative search; `a3:iterations=0.125` is the aggressive search.
            `a3:approximate=false` scores all keys.
Cost        Keys must be sorted before attention. The paper sorts outside the accelerator and reports 7 % (conservative)
            or 24 % (aggressive) more time.
Avoid       Sequences of more than `most_keys` (320) keys, because area and power are published for 320 keys.
Does not    Count the time of sorting the keys, or speed up attention in software."""

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("select", "score", "exponent", "output")
DRAIN = 9
"""Extra cycles of a module after its last key: 7 for a division and 2 for a multiply-accumulate. These cycles apply to
all three modules, as in the paper's base design.
"""


def search_cycles(iterations: np.ndarray, depth: int, columns: int, multipliers: int) -> np.ndarray:
    """Return the cycles of the greedy search: one per iteration, plus the cycles that fill the queues.

    To fill the queues, all multipliers compute `depth` products for both ends of each sorted column. The filling takes
    `depth` cycles with 2 · `columns` multipliers.
    """
    refill = -(-2 * depth * columns // multipliers)
    return iterations + refill


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per query of a layer. Each item passes the stations for search, scores, exponentials and outputs.

    Without `approximate`, each of the last three modules takes n + 9 cycles for n keys. With `approximate`, a query
    first fills the queues and then searches for M cycles, one iteration per cycle. C candidate keys and K kept keys
    then pass the three modules.

    A trace may record "iterations" (M) and "candidates" (C) of each query. By default M = `iterations` · n and C = K.
    A module splits a wider key into parts, one cycle per part. In the paper, all heads have the module's width.
    """
    approximate = bool(machine.settings["approximate"])
    keys = layer.unit_keys[:, None]
    score_parts, value_parts = (-(-layer.width // machine.stations[name].width) for name in ("score", "output"))
    scanned = int(machine.number("scanned"))
    if approximate:
        kept, searched = layer.kept_counts, layer.count("iterations")
        counts = layer.count("candidates")
        candidates = kept if counts is None else np.maximum(counts, kept)
        if (candidates > keys).any():
            raise UsageError(
                f"layer {layer.name!r}: a query has {candidates.max()} candidates of {layer.keys} keys",
                fix=f'reduce its "candidates" to at most {layer.keys}',
            )
        iterations = np.ceil(machine.number("iterations") * keys).astype(np.int64) if searched is None else searched
        depth, width = int(machine.number("depth")), machine.stations["score"].width
        selecting = search_cycles(iterations, depth, layer.width, 2 * width)
        scoring = np.maximum(candidates * score_parts, ceil_div(keys, scanned)) + DRAIN
        weighing = ceil_div(candidates, int(machine.number("compared"))) + kept + DRAIN
    else:
        candidates = kept = layer.kept_counts * 0 + keys
        iterations, selecting = np.int64(0), np.int64(0)
        scoring, weighing = candidates * score_parts + DRAIN, candidates + DRAIN
    cycles = (selecting, scoring, weighing, kept * value_parts + DRAIN)
    service = np.stack([layer.per_query(each) for each in cycles])
    scores, weighed = (float(layer.per_query(each).sum()) for each in (candidates, kept))
    read, written = operand_bytes(layer, machine.number("bits"))
    sorted_keys = 2 * layer.unit_keys * layer.width * machine.number("bits") / 8 if approximate else 0
    return ItemStream(
        service=service,
        macs=(scores + weighed) * layer.width,
        read=read + sorted_keys,
        written=written,
        operations=_operations(layer, machine, scores, weighed, float(layer.per_query(iterations).sum())),
        notes=_notes(layer, machine),
    )


def _operations(
    layer: AttentionLayer, machine: AcceleratorSpec, candidates: float, kept: float, iterations: float
) -> Operations:
    bits, width = int(machine.number("bits")), layer.width
    queries = float(layer.unit_queries.sum())
    memories = {name: machine.size(name) for name in ("keys", "values", "sorted keys")}
    refilled = 2 * machine.number("depth") * width * queries * bool(iterations)
    return add_up(
        # per iteration, at both ends: a comparison tree over all columns, an addition to a score, a new product
        {
            PricedOperation("int_add", 2 * bits): iterations * (2 * width + 2),
            PricedOperation("int_multiply", bits): 2 * iterations,
        },
        {PricedOperation("int_multiply", bits): refilled},
        {PricedOperation("sram", 2 * bits, memories["sorted keys"]): 2 * iterations + refilled},
        multiply_accumulate((candidates + kept) * width, bits),
        {PricedOperation("sram", width * bits, memories["keys"]): candidates},
        {PricedOperation("sram", width * bits, memories["values"]): kept},
        {
            PricedOperation("int_multiply", 2 * bits): kept + queries * width,
            PricedOperation("int_add", 2 * bits): 2 * candidates,
        },
    )


def _notes(layer: AttentionLayer, machine: AcceleratorSpec) -> tuple[str, ...]:
    notes = []
    if machine.settings["approximate"]:
        notes.append("A3: the time of sorting the keys outside the accelerator is not counted")
        if layer.count("candidates") is None:
            notes.append("A3: the trace has no counts of candidates, so only kept keys are scored")
        searched = layer.count("iterations")
        if searched is not None and (most := (searched / layer.unit_keys[:, None]).max()) >= 1:
            notes.append(f"A3: the search takes up to {most:.2g} iterations per key; the default is 0.5")
    most = machine.number("most_keys")
    if layer.keys > most:
        notes.append(f"A3: area and power are published for {most:.0f} keys; the trace has {layer.keys}")
    return tuple(notes)


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["score"].width + machine.stations["output"].width


SETTINGS = {
    "approximate": True,
    "iterations": 0.5,
    "depth": 4,
    "scanned": 16,
    "compared": 16,
    "bits": 9,
    "most_keys": 320,
}
SIZES = ("depth", "scanned", "compared", "bits", "most_keys")
DESIGN = AcceleratorDesign("a3", STATIONS, lower, multipliers, SETTINGS, SIZES)
