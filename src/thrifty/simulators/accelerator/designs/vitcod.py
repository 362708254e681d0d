"""ViTCoD (You et al. 2023): split a fixed mask into dense columns and sparse pairs.

Paper       You et al. 2023, ViTCoD: Vision Transformer Acceleration via Dedicated Algorithm and Accelerator Co-Design
            (HPCA 2023). Only parts of the paper were read. Sizes are from the released simulator.
Promise     Dense work (columns of global tokens) and sparse work (other pairs) run at the same time.
Use         thrifty.trace("diagonal", "trace.safetensors", density=0.1, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["vitcod"], measure=False)
Start with  `vitcod`; a global token is a key that more than `global_tokens` (50) queries keep. `vitcod:coded=false`
            reads queries and keys without compression over heads.
Cost        Queries and keys are stored for fewer heads than the model has and must be decoded.
Avoid       Masks that depend on the input, because the paper's mask is fixed after training.
Does not    Simulate softmax, or reproduce the paper's mean speedups over a GPU (86.0) and Sanger (6.8); the paper
            averages six models with 90 % of pairs pruned and uses its own baselines."""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("lines",)


def split_pairs(kept: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of global tokens (units,) of masks (units, queries, keys), and the number of pairs (units,) in
    all other columns.

    A global token is a column with more than `limit` pairs.
    """
    columns = kept.sum(1, dtype=np.int64)
    return (columns > limit).sum(1), np.where(columns > limit, 0, columns).sum(1)


def shared_lines(denser: np.ndarray, sparser: np.ndarray, lines: int) -> np.ndarray:
    """Return the number of lines (units,) for global tokens, in proportion to their pairs. A line is a row of
    multipliers.

    A part (dense or sparse) has at least one line, unless the part is empty.
    """
    share = (lines * denser / np.maximum(denser + sparser, 1)).astype(np.int64)
    return np.clip(share, np.minimum(denser, 1), lines - np.minimum(sparser, 1))


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return three items per head: decode, scores and values. All three items run on the same lines of multipliers.

    All pairs of global tokens are computed; other columns compute their kept pairs. Per head, lines are divided between
    dense and sparse work in proportion to the pairs. Queries and keys are decoded from fewer heads than the model has.
    For scores, keys stay in place and the multipliers of a line add their products.
    """
    lines, each = machine.stations["lines"].width, int(machine.number("line"))
    width, bits = layer.width, machine.number("bits")
    global_tokens, sparser = split_pairs(layer.kept(), int(machine.number("global_tokens")))
    denser = global_tokens * layer.unit_queries
    denser_lines = shared_lines(denser, sparser, lines)
    sparser_lines = lines - denser_lines
    code = int(np.ceil(layer.heads * machine.number("code"))) if machine.settings["coded"] else 0
    vectors = layer.unit_queries + layer.unit_keys
    decoded = vectors * width * code
    depth = -(-width // each)
    # keys stay in place: a line computes one query in the dense part, one pair in the sparse part
    scores = np.maximum(
        global_tokens * ceil_div(layer.unit_queries, np.maximum(denser_lines, 1)) * depth,
        ceil_div(sparser, np.maximum(sparser_lines, 1)) * depth,
    )
    values = np.maximum(
        ceil_div(denser * width, np.maximum(denser_lines, 1) * each),
        ceil_div(sparser * width, np.maximum(sparser_lines, 1) * each),
    )
    service = np.stack([ceil_div(decoded, lines * each), scores, values], axis=-1)[None].astype(np.int64)
    share = code / layer.heads if code else 1.0
    computed = (denser + sparser).astype(float)
    indices = 2 * sparser * machine.number("index_bits") / 8
    return ItemStream(
        service=service,
        macs=2 * float(computed.sum()) * width,
        read=(vectors * share + layer.unit_keys) * width * bits / 8 + indices,
        written=layer.unit_queries * width * bits / 8,
        operations=_operations(layer, machine, float(computed.sum()), float(decoded.sum())),
        notes=_notes(layer, machine),
    )


def _operations(layer: AttentionLayer, machine: AcceleratorSpec, pairs: float, decoded: float) -> Operations:
    bits, width = int(machine.number("bits")), layer.width
    queries = float(layer.unit_queries.sum())
    memory = machine.size("operands")
    return add_up(
        multiply_accumulate(2 * pairs * width + decoded, bits),
        {PricedOperation("sram", width * bits, memory): 2 * pairs + 2 * queries},
        {PricedOperation("float_multiply", 16): pairs + queries * width, PricedOperation("float_add", 16): pairs},
    )


def _notes(layer: AttentionLayer, machine: AcceleratorSpec) -> tuple[str, ...]:
    notes = ["ViTCoD: softmax is not simulated, as in the released simulator"]
    operands = layer.keys * layer.width * machine.number("bits") / 8
    if operands > machine.size("operands"):
        notes.append(f"ViTCoD: the memories do not hold the {layer.keys} keys of a head; repeated reads are ignored")
    return tuple(notes)


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["lines"].width * int(machine.number("line"))


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with as many lines of multipliers as `budget` allows."""
    before = machine.stations["lines"]
    stations = {"lines": replace(before, width=budget // int(machine.number("line")))}
    modules = machine.scaled_modules({"lines": stations["lines"].width / before.width})
    return replace(machine, stations=stations, modules=modules)


def two_lines(machine: AcceleratorSpec) -> int:
    """Return the number of multipliers of the smallest machine: one line for dense and one for sparse work."""
    return 2 * int(machine.number("line"))


SETTINGS = {"line": 8, "global_tokens": 50, "coded": True, "code": 0.5, "bits": 8, "index_bits": 8}
SIZES = ("line", "bits", "index_bits")
DESIGN = AcceleratorDesign("vitcod", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, two_lines, grows=True)


def released_linear_cycles(tokens: int, heads: int, layers: int) -> tuple[int, int]:
    """Return the cycles of the projections around attention, and of the MLP's two linear layers.

    The rules are from the released simulator, for head width 64. `lower` does not follow that simulator: `lower`
    computes each head separately.
    """
    width, multipliers = heads * 64, 512
    share = multipliers // heads
    projections = 3 * tokens * (width * 64 // share) + tokens * width * 64 // share
    return layers * projections, layers * 2 * (4 * tokens * width**2 // multipliers)
