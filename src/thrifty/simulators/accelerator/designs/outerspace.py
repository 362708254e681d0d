"""OuterSPACE (Pal et al. 2018): multiply sparse matrices by outer products, then merge rows.

Paper       Pal et al. 2018, OuterSPACE: An Outer Product Based Sparse Matrix Multiplication Accelerator (HPCA 2018).
            The body of the paper was not read. Byte counts follow the released code of TeAAL, a model of OuterSPACE.
Promise     Zeros are neither read nor multiplied.
Use         product = thrifty.simulate.spgemm(size=200, density=0.02, measure=False)
Start with  `outerspace`, 16 tiles that share 128 GB/s.
Cost        Partial products are written to memory and read back, once or more.
Avoid       Comparisons with the abstract's speedups, because the baselines of the paper are libraries of 2017.
            Conclusions from the memory latency of 100 ns, because this value is recalled, not checked against the
            paper.
Does not    Compute attention, or simulate the CPU and GPU of the paper's comparison."""

# A machine is one tile with its part of the memory's channels; `copies` is the number of tiles. Columns and rows are
# assigned to tiles in round-robin order.

from dataclasses import replace

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, whole_cycles
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up
from thrifty.simulators.accelerator.spgemm_workload import SpgemmPhase, SpgemmProduct

STATIONS = ("deal", "work", "move")
NUMBER, CHUNK, ROW, POINTER = 12, 4, 4, 6
"""Bytes of a value with its index, of a chunk's header, of a result row's header and of an operand row's header. A
chunk is the partial products of one value of A.
"""


def traffic(product: SpgemmProduct, machine: AcceleratorSpec) -> dict[str, float]:
    """Return the bytes between the chip and its memory, by matrix.

    The matrices are the operands "A" and "B", the partial products "T" (written and read) and the result "Z". A value
    takes 12 bytes, as in TeAAL's model. Header sizes are derived from TeAAL's released byte counts.
    """
    used = product.columns > 0
    reads = _reads(product, machine)
    passes = merge_passes(product.chunks, machine)
    partial = NUMBER * product.partial + CHUNK * product.chunks + ROW
    return {
        "A": float(NUMBER * product.a.nnz + POINTER * product.a.shape[1]),
        "B": float((NUMBER * product.rows * reads + POINTER)[used].sum()),
        "T": float((2 * partial * passes).sum()),
        "Z": float((NUMBER * product.result_counts + ROW).sum()),
    }


def _reads(product: SpgemmProduct, machine: AcceleratorSpec) -> np.ndarray:
    """Return the number of reads of each row of B (k, n), as an array (k,).

    A row that fits the tile's cache is read once. Other rows are read once per `elements` values of A's column.
    """
    fits = product.rows * NUMBER <= machine.size("cache")
    return np.where(fits, 1, ceil_div(product.columns, machine.stations["work"].width))


def merge_passes(chunks: np.ndarray, machine: AcceleratorSpec) -> np.ndarray:
    """Return the number of merge passes for rows with `chunks` lists of partial products. The scratchpad limits the
    lists per pass.
    """
    heads = max(2, machine.size("scratchpad") // (NUMBER + CHUNK))
    return np.maximum(1, np.ceil(np.log(np.maximum(chunks, 1)) / np.log(heads) - 1e-9)).astype(np.int64)


def lower(phase: SpgemmPhase, machine: AcceleratorSpec) -> ItemStream:
    """Return the items of a phase: "multiply" or "merge".

    The paper does not describe this latency model. We derived it while knowing the published times, which are four to
    nine times longer than bandwidth alone explains. In two sequences of memory accesses, each access waits for the
    whole `latency`. A tile's control assigns one value of A at a time, because the value's chunk must first be
    allocated and linked. A processing element that merges loads one value at a time, because the previous value decides
    which value is next. The latency of 100 ns is not fitted. It is rounded from notes that say 80 to 150 ns
    (unverified).

    The abstract's speedups of 7.9 (MKL), 13.0 (cuSPARSE) and 14.0 (CUSP) compare with libraries and processors of 2017.
    Only the accelerator is simulated here.
    """
    lowered = {"multiply": _multiply, "merge": _merge}
    return lowered[phase.name](phase.product, machine)


def _multiply(product: SpgemmProduct, machine: AcceleratorSpec) -> ItemStream:
    """Return the items of the multiply phase. An item is a part of a column of A with the matching row of B.

    Each processing element of a tile multiplies the row by one value of the column. It appends the products as a chunk
    to the list of a result row.
    """
    elements = machine.stations["work"].width
    used = np.flatnonzero((product.columns > 0) & (product.rows > 0))
    columns, rows, reads = (each[used] for each in (product.columns, product.rows, _reads(product, machine)))
    pieces = ceil_div(columns, elements)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = np.minimum(np.repeat(columns, pieces) - number * elements, elements)
    row, is_read = np.repeat(rows, pieces), (number < np.repeat(reads, pieces)) * 1
    written = size * (NUMBER * row + CHUNK)
    read = size * NUMBER + is_read * (NUMBER * row + POINTER)
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
    """Return the items of the merge phase. An item is a row of the result; half of the processing elements merge one
    row each. A processing element keeps the current value of each chunk, sorted by column. It emits the value of the
    smallest column and loads the next value of the same chunk. Values of the same column are added.
    """
    passes, latency = merge_passes(product.chunks, machine), _latency(machine)
    # a new value is compared with the current values of half of the chunks, on average
    sorting = ceil_div(product.chunks, 2 * int(machine.number("sorted")))
    working = latency + product.partial * passes * (latency + sorting)
    moved = 2 * passes - 1  # read in each pass, written in all but the last
    row_bytes = moved * (NUMBER * product.partial + CHUNK * product.chunks + ROW) + NUMBER * product.result_counts + ROW
    cycles = np.stack([0 * working, working, row_bytes * machine.clock / _outer(machine).bandwidth])
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
    zeros = np.zeros(service.shape[1])
    return ItemStream(
        service=service,
        macs=macs,
        read=zeros + read / len(zeros),
        written=zeros + written / len(zeros),
        operations=operations,
        overlapped=True,
        notes=("OuterSPACE: the latency model is ours; its 100 ns are recalled, not checked against the paper",),
    )


def _by_tile(cycles: np.ndarray, tile: np.ndarray, tiles: int) -> np.ndarray:
    """Assign items to tiles in order, and round the items' cycles (stations, items). Return (stations, tiles, items of
    a tile).
    """
    order = np.argsort(tile, kind="stable")
    counts = np.bincount(tile, minlength=tiles)
    place = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    assigned = np.zeros((len(cycles), tiles, int(counts.max())))
    assigned[:, tile[order], place] = cycles[:, order]
    return whole_cycles(assigned)


def _latency(machine: AcceleratorSpec) -> int:
    return round(_outer(machine).latency * machine.clock)


def _outer(machine: AcceleratorSpec) -> AcceleratorMemory:
    if "dram" not in machine.memories:
        raise UsageError(
            f"machine {machine.name!r} lacks memory 'dram', which outerspace requires",
            fix="add [memories.dram] with bandwidth = 8e9 to its file",
        )
    return machine.memories["dram"]


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["work"].width


SETTINGS = {"merging": 8, "sorted": 1}
SIZES = ("merging", "sorted")
DESIGN = AcceleratorDesign("outerspace", STATIONS, lower, multipliers, SETTINGS, SIZES, workload="spgemm")
