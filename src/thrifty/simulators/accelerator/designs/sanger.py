"""Sanger (Lu et al. 2021): predict a mask from 4-bit scores and pack it into a dense array.

Paper       Lu et al. 2021, Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable
            Architecture (MICRO 2021). The body of the paper was not read. Sizes are from released code and notes on the
            paper.
Promise     Only kept pairs occupy the array. Scores stay in the array for the product with values.
Use         thrifty.trace("uniform", "trace.safetensors", density=0.1, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["sanger"], measure=False)
Start with  `sanger`; `sanger:packing=columns` packs as the released code does. `sanger:skewed=true` fills the array
            before each product, as the released cost model does.
Cost        All scores are predicted at 4 bits. Rows with few kept pairs leave elements of the array idle.
Avoid       Comparisons with the paper's speedups over A3 (2.39) and SpAtten (1.47), because these divide throughputs
            from three papers with different masks.
Does not    Pack all heads together, unlike the released cost model; the simulation packs each head separately."""

from dataclasses import replace

import numpy as np

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import (
    AcceleratorDesign,
    ItemStream,
    ceil_div,
    operand_bytes,
    whole_cycles,
)
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("predict", "pack", "attend")
PACKINGS = ("split", "columns")


def released_seconds(density: float, utilisation: float, tokens: int, version: int = 2) -> float:
    """Return the seconds of one attention block of BERT-base by a released cost model.

    The block has width 768; the array has 64 x 16 elements at 1 GHz. In both versions, the mask also shortens the
    output projection. Version 1 divides operations by the peak. Version 2 sums over tiles of 64 x 64. Two errors of the
    released model are reproduced: all heads are packed together, and the number of sub-rows replaces the width of the
    values.
    """
    width, peak, side = 768, 2 * 64 * 16 * 1e9, 64
    projected = 2 * tokens * width**2
    saved = density / utilisation
    linear = 3 * projected / peak
    if version == 1:
        return linear + (4 * tokens**2 * width + projected) * saved / peak
    loads = tokens * saved / 0.25
    tile = (width + side) + (loads + side)
    return linear + loads / side * tokens / side * tile / 1e9 + projected * saved / peak


def sub_row_counts(kept: np.ndarray, ports: int) -> np.ndarray:
    """Return the number of kept pairs (units, queries, tiles) per row in each tile of `ports` columns."""
    padded = np.pad(kept, ((0, 0), (0, 0), (0, -kept.shape[-1] % ports)))
    return padded.reshape(*kept.shape[:2], -1, ports).sum(-1, dtype=np.int64)


def split_loads(kept: np.ndarray, ports: int, elements: int, rows: int) -> np.ndarray:
    """Return how often the processing array is loaded, (units, tiles), for masks (units, queries, keys). Sub-rows of
    all queries are packed together.
    """
    return ceil_div(ceil_div(sub_row_counts(kept, ports), elements).sum(1), rows)


def column_loads(kept: np.ndarray, elements: int, rows: int) -> np.ndarray:
    """Return how often the processing array is loaded in the released packing, (units, groups of rows), for masks
    (units, queries, keys).

    A new load begins at a column that would exceed `elements` in some row. Empty columns are skipped.
    """
    padded = np.pad(kept, ((0, 0), (0, -kept.shape[1] % rows), (0, 0)))
    grouped = padded.reshape(kept.shape[0], -1, rows, kept.shape[-1])
    counts = np.zeros(grouped.shape[:3], dtype=np.int64)
    loads = np.zeros(grouped.shape[:2], dtype=np.int64)
    for bits in np.moveaxis(grouped, -1, 0):
        nonempty = bits.any(-1)
        begins = nonempty & ((loads == 0) | ((counts + bits) > elements).any(-1))
        loads += begins
        counts = np.where(begins[..., None], 0, counts) + bits
    return loads


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per load of the array.

    The columns are cut into tiles of `ports`. In each tile, empty rows are dropped. Rows with more than `elements` kept
    pairs are split into sub-rows. A load is one sub-row per row of the array. With head width d, a load takes d cycles
    for scores, which stay in place, and d cycles for values. `packing` "columns" follows the released code. For each
    group of queries, the packer adds columns in order until some row has no free element.

    With `skewed`, the array is filled before each load and product, as in the released cost model. Otherwise loads
    follow without a gap, and the array is filled once.
    """
    rows, elements = machine.stations["attend"].width, int(machine.number("elements"))
    ports, width, kept = int(machine.number("ports")), layer.width, layer.kept()
    packing = str(machine.settings["packing"])
    refuse_unknown("Sanger has no packing", packing, PACKINGS)
    if packing == "split":
        loads = split_loads(kept, ports, elements, rows).sum(1)
    else:
        loads = column_loads(kept, elements, rows).sum(1)
    item = np.arange(int(loads.max()))
    present = item < loads[:, None]
    fill = machine.number("skew") if machine.settings["skewed"] else 0.0
    attending = np.where(present, int(2 * (width + fill)), 0)
    pairs = layer.unit_queries * layer.unit_keys
    # one tile of predicted scores takes d cycles (head width d); one column is packed per cycle
    predicted = ceil_div(layer.unit_queries, ports) * ceil_div(layer.unit_keys, ports)
    totals = [predicted * ceil_div(ports**2 * width, machine.stations["predict"].width)]
    totals.append(ceil_div(layer.unit_queries, machine.stations["pack"].width) * layer.unit_keys)
    cycles = [np.where(present, (total / loads)[:, None], 0.0) for total in totals]
    service = np.stack([*(whole_cycles(each) for each in cycles), attending]).astype(np.int64)
    read, written = operand_bytes(layer, machine.number("bits"))
    lead = np.full(layer.units, 0 if machine.settings["skewed"] else int(machine.number("skew")), dtype=np.int64)
    return ItemStream(
        service=service,
        macs=2.0 * float(kept.sum()) * width,
        lead=lead,
        read=read,
        written=written,
        operations=_operations(layer, machine, float(kept.sum()), float(pairs.sum())),
    )


def _operations(layer: AttentionLayer, machine: AcceleratorSpec, kept: float, pairs: float) -> Operations:
    bits, width = int(machine.number("bits")), layer.width
    queries, keys = float(layer.unit_queries.sum()), float(layer.unit_keys.sum())
    memory = machine.size("operands")
    return add_up(
        multiply_accumulate(pairs * width, int(machine.number("predicted_bits")), 16),
        # norms of queries and keys; each predicted score is scaled by both norms and compared
        multiply_accumulate((queries + keys) * width, bits),
        {PricedOperation("int_multiply", bits): 2 * pairs, PricedOperation("int_add", bits): pairs},
        multiply_accumulate(2 * kept * width, bits),
        {PricedOperation("sram", width * bits, memory): 2 * kept / machine.number("elements") + 2 * queries + 2 * keys},
        # per element an exponential by a power of two and a table, per row a division at the end
        {PricedOperation("int_multiply", bits): kept + queries * width, PricedOperation("int_add", bits): 2 * kept},
    )


def multipliers(machine: AcceleratorSpec) -> int:
    """Return the number of multipliers. As in the paper, the 4-bit multipliers of the prediction array do not count."""
    return machine.stations["attend"].width * int(machine.number("elements"))


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with fewer rows. The prediction array shrinks in proportion."""
    rows, before = budget // elements(machine), machine.stations["attend"].width
    modules = machine.scaled_modules(dict.fromkeys(STATIONS, rows / before))
    return replace(machine, stations=machine.scaled_stations(rows, before), modules=modules)


def elements(machine: AcceleratorSpec) -> int:
    """Return the number of multipliers per row."""
    return int(machine.number("elements"))


SETTINGS = {
    "elements": 16,
    "ports": 64,
    "packing": "split",
    "skewed": False,
    "skew": 64,
    "bits": 16,
    "predicted_bits": 4,
}
SIZES = ("elements", "ports", "bits", "predicted_bits")
DESIGN = AcceleratorDesign("sanger", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, elements)
