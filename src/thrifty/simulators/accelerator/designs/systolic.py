"""Systolic array (Samajdar et al. 2020): run attention as two dense matrix products per head.

Paper       Samajdar et al. 2020, A systematic methodology for characterizing scalability of DNN accelerators using
            SCALE-Sim (ISPASS 2020).
Promise     Cycles without memory stalls equal the reports of SCALE-Sim 3.0.
Use         open("layers.csv", "w").write("Layer,M,N,K,\\nscores,512,512,64,\\n")
            result = thrifty.simulate.gemm("layers.csv")
Start with  `systolic`, a 32 x 32 array. `systolic:dataflow=ws` is weight stationary, `is` is input stationary.
Cost        Each tile of the product adds the cycles that fill and drain the array.
Avoid       Comparisons that depend on softmax, because neither SCALE-Sim nor this design simulates softmax.
Does not    Use masks, or count memory stalls in `thrifty.simulate.gemm`."""

from dataclasses import replace

import numpy as np

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, operand_bytes
from thrifty.simulators.accelerator.priced_operations import PricedOperation, add_up, multiply_accumulate

DATAFLOWS = ("os", "ws", "is")
STATIONS = ("array",)
Count = np.ndarray | int


def folds(m: Count, n: Count, k: Count, rows: int, columns: int, dataflow: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of folds (array tiles) of the product (m, k) x (k, n), and the cycles per fold. m, n and k may
    be arrays that broadcast."""
    refuse_unknown("there is no dataflow", dataflow, DATAFLOWS)
    m, n, k = np.asarray(m), np.asarray(n), np.asarray(k)
    if dataflow == "os":
        count, each = -(-m // rows) * -(-n // columns), k + rows + columns - 2
    else:
        stationary, passing = (n, m) if dataflow == "ws" else (m, n)
        count, each = -(-k // rows) * -(-stationary // columns), passing + 2 * rows + columns - 2
    count, each = np.broadcast_arrays(count, each)
    return count, each


def reported_cycles(m: Count, n: Count, k: Count, rows: int, columns: int, dataflow: str) -> np.ndarray:
    """Return the total cycles of a matrix product without stalls, as in the reports of SCALE-Sim 3.0.

    M x N x K on R rows and C columns take: output stationary ⌈M/R⌉·⌈N/C⌉·(K + R + C - 2), weight stationary
    ⌈K/R⌉·⌈N/C⌉·(M + 2R + C - 2), input stationary ⌈K/R⌉·⌈M/C⌉·(N + 2R + C - 2). SCALE-Sim reports one cycle less: the
    index of the last cycle, from 0. The formulas were derived from runs of SCALE-Sim.
    """
    count, each = folds(m, n, k, rows, columns, dataflow)
    return count * each - 1


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per fold: for each head, the folds of the score product, then the folds of the value product."""
    rows, columns = int(machine.number("rows")), int(machine.number("columns"))
    dataflow, width = str(machine.settings["dataflow"]), layer.width
    queries, keys = layer.unit_queries, layer.unit_keys
    score_folds, score_cycles = folds(queries, keys, width, rows, columns, dataflow)
    value_folds, value_cycles = folds(queries, width, keys, rows, columns, dataflow)
    number = np.arange(int((score_folds + value_folds).max()))
    each = np.where(number < score_folds[:, None], score_cycles[:, None], value_cycles[:, None])
    service = np.where(number < (score_folds + value_folds)[:, None], each, 0).astype(np.int64)[None]
    macs = 2 * float((queries * keys).sum()) * width
    bits = int(machine.number("bits"))
    read, written = operand_bytes(layer, bits)
    fetched = (score_folds * score_cycles + value_folds * value_cycles).sum() * (rows + columns)
    memory = machine.size("operands")
    return ItemStream(
        service=service,
        macs=macs,
        read=read,
        written=written,
        operations=add_up(multiply_accumulate(macs, bits), {PricedOperation("sram", bits, memory): float(fetched)}),
        notes=("systolic: softmax is not simulated",),
    )


def multipliers(machine: AcceleratorSpec) -> int:
    return int(machine.number("rows") * machine.number("columns"))


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return a nearly square array of at most `budget` multipliers. The number of rows is a power of two."""
    rows = 1 << ((budget.bit_length() - 1) // 2)
    settings = {**machine.settings, "rows": rows, "columns": budget // rows}
    return replace(machine, settings=settings)


SETTINGS = {"rows": 32, "columns": 32, "dataflow": "os", "bits": 8}
SIZES = ("rows", "columns", "bits")
DESIGN = AcceleratorDesign("systolic", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, grows=True)
