"""OuterSPACE: sparse matrices multiplied column by row, then merged row by row (Pal et al., HPCA 2018).

Multiply: a tile takes a column of A and the row of B that goes with it; each of its elements takes a number of the
column, multiplies the row, and appends that as a chunk to the list of its row of the result. Merge: half of the
elements take a row of the result each, keep the first number of every chunk sorted, put out the smallest and load the
next of its chunk, adding up what falls on one place.

What has to wait for memory, one after the other: a tile's control deals out one number of A at a time, since the chunk
for it has to be taken and linked first; a merging element loads one number at a time, since which one is known only
when the one before is sorted in. Each takes the whole `latency` of the memory. That is our reading of the mechanism,
made with published times at hand, which bandwidth alone misses four to nine times over; the body of the paper was not
read, and the latency is the round one of 100 ns that notes have (80 to 150; unverified), not fitted. Bytes are those of
TeAAL's model of it (graded R): 12 of a number, and heads of chunks and rows as worked out from its released counts.

The abstract's 7.9, 13.0 and 14.0 times over MKL, cuSPARSE and CUSP are of libraries and processors of 2017: only the
accelerator's own side of them is simulated.

One machine is one tile with its share of the memory's channels; tiles are `copies`, to which columns and rows are dealt
in turn.
"""

from dataclasses import replace

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, whole_cycles
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up
from thrifty.simulators.accelerator.spgemm_workload import SpgemmPhase, SpgemmProduct

STATIONS = ("deal", "work", "move")
NUMBER, CHUNK, ROW, POINTER = 12, 4, 4, 6
"""Bytes: a number with its place, the head of a chunk, that of a row of results, and that of an operand's row."""


def traffic(product: SpgemmProduct, machine: AcceleratorSpec) -> dict[str, float]:
    """Bytes between the chip and its memory: operands "A" and "B", products "T" (written and read), the result "Z"."""
    used = product.columns > 0
    read_again = _reads(product, machine)
    passes = merge_passes(product.chunks, machine)
    partial = NUMBER * product.partial + CHUNK * product.chunks + ROW
    return {
        "A": float(NUMBER * product.a.nnz + POINTER * product.a.shape[1]),
        "B": float((NUMBER * product.rows * read_again + POINTER)[used].sum()),
        "T": float((2 * partial * passes).sum()),
        "Z": float((NUMBER * product.found + ROW).sum()),
    }


def _reads(product: SpgemmProduct, machine: AcceleratorSpec) -> np.ndarray:
    """(k,) how often a row of B comes in: once if the tile's cache holds it, else for each `elements` of the column."""
    fits = product.rows * NUMBER <= machine.size("cache")
    return np.where(fits, 1, ceil_div(product.columns, machine.stations["work"].width))


def merge_passes(chunks: np.ndarray, machine: AcceleratorSpec) -> np.ndarray:
    """How often rows of so many chunks are gone through, where a scratchpad holds the heads of only so many."""
    heads = max(2, machine.size("scratchpad") // (NUMBER + CHUNK))
    return np.maximum(1, np.ceil(np.log(np.maximum(chunks, 1)) / np.log(heads) - 1e-9)).astype(np.int64)


def lower(phase: SpgemmPhase, machine: AcceleratorSpec) -> ItemStream:
    lowered = {"multiply": _multiply, "merge": _merge}
    return lowered[phase.name](phase.product, machine)


def _multiply(product: SpgemmProduct, machine: AcceleratorSpec) -> ItemStream:
    elements = machine.stations["work"].width
    used = np.flatnonzero((product.columns > 0) & (product.rows > 0))
    columns, rows, again = (each[used] for each in (product.columns, product.rows, _reads(product, machine)))
    pieces = ceil_div(columns, elements)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = np.minimum(np.repeat(columns, pieces) - number * elements, elements)
    row, comes = np.repeat(rows, pieces), (number < np.repeat(again, pieces)) * 1
    written = size * (NUMBER * row + CHUNK)
    read = size * NUMBER + comes * (NUMBER * row + POINTER)
    tile = np.repeat(np.arange(len(used)) % machine.copies, pieces)
    latency = _latency(machine)
    cycles = np.stack([size * latency, latency + row, (read + written) * machine.clock / _outer(machine).bandwidth])
    moved = traffic(product, machine)
    return _stream(
        _by_tile(cycles, tile, machine.copies),
        moved["A"] + moved["B"],
        moved["T"] / 2,
        add_up(
            {PricedOperation("float_multiply", 64): product.multiplies},
            {PricedOperation("sram", 96, machine.size("cache")): product.multiplies},
        ),
        macs=product.multiplies,
    )


def _merge(product: SpgemmProduct, machine: AcceleratorSpec) -> ItemStream:
    passes, latency = merge_passes(product.chunks, machine), _latency(machine)
    # a number is sorted in among the heads of all chunks, half of which it passes
    sorting = ceil_div(product.chunks, 2 * int(machine.number("sorted")))
    working = latency + product.partial * passes * (latency + sorting)
    moved = 2 * passes - 1  # read in each pass, written in all but the last
    bytes_of_row = moved * (NUMBER * product.partial + CHUNK * product.chunks + ROW) + NUMBER * product.found + ROW
    cycles = np.stack([0 * working, working, bytes_of_row * machine.clock / _outer(machine).bandwidth])
    stream = _stream(
        _by_tile(cycles, np.arange(len(working)) % machine.copies, machine.copies),
        traffic(product, machine)["T"] / 2,
        traffic(product, machine)["Z"],
        add_up(
            {PricedOperation("float_add", 64): product.adds},
            {PricedOperation("sram", 96, machine.size("scratchpad")): 2 * float(product.partial.sum())},
            {PricedOperation("int_add", 32): float((product.partial * passes * sorting).sum())},
        ),
        macs=0.0,
    )
    return replace(stream, servers={"work": int(machine.number("merging"))})


def _stream(service: np.ndarray, read: float, written: float, operations: Operations, macs: float) -> ItemStream:
    none = np.zeros(service.shape[1])
    return ItemStream(
        service=service,
        macs=macs,
        read=none + read / len(none),
        written=none + written / len(none),
        operations=operations,
        overlapped=True,
        notes=("OuterSPACE: which chains wait for memory is our reading, and its latency is from memory: unverified",),
    )


def _by_tile(cycles: np.ndarray, tile: np.ndarray, tiles: int) -> np.ndarray:
    """(s, i) cycles as whole ones (s, tiles, items of a tile), items in order."""
    order = np.argsort(tile, kind="stable")
    counts = np.bincount(tile, minlength=tiles)
    place = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    dealt = np.zeros((len(cycles), tiles, int(counts.max())))
    dealt[:, tile[order], place] = cycles[:, order]
    return whole_cycles(dealt)


def _latency(machine: AcceleratorSpec) -> int:
    return round(_outer(machine).latency * machine.clock)


def _outer(machine: AcceleratorSpec) -> AcceleratorMemory:
    if "dram" not in machine.memories:
        raise UsageError(
            f"machine {machine.name} lacks memory 'dram', which outerspace needs", fix="add [memories.dram]"
        )
    return machine.memories["dram"]


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["work"].width


SETTINGS = {"merging": 8, "sorted": 1}
SIZES = ("merging", "sorted")
DESIGN = AcceleratorDesign("outerspace", STATIONS, lower, multipliers, SETTINGS, SIZES, workload="spgemm")
