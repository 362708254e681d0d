"""ViTCoD: a fixed mask split into columns that almost all queries keep and the rest, computed side by side (You et al.,
HPCA 2023).

A key that more than `global_tokens` queries keep is a global token: its column is computed whole. The other columns
are computed by the pairs that they keep. Lines of multipliers are shared out between both in proportion to their work,
for each head. A head is three items: decoding its queries and keys from fewer heads than there are, its scores (keys
stay, products are added up between multipliers), and its values. All three take the same lines.

This is the mechanism, head by head; of the released simulator only its rule for linear layers is here. The paper's
averages of 86.0 times over a GPU and 6.8 over Sanger are of six models at 90 % pruned and of its authors' own versions
of the others: not reproduced. Only parts of the paper were read; sizes are those of its released simulator.
"""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("lines",)


def split_pairs(kept: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """(u,) global tokens, columns of masks (u, t, s) with more than `limit` pairs, and (u,) pairs of the other ones."""
    columns = kept.sum(1, dtype=np.int64)
    return (columns > limit).sum(1), np.where(columns > limit, 0, columns).sum(1)


def shared_lines(denser: np.ndarray, sparser: np.ndarray, lines: int) -> np.ndarray:
    """(u,) lines for the global tokens, in proportion to their pairs; at least one for each part that there is."""
    share = (lines * denser / np.maximum(denser + sparser, 1)).astype(np.int64)
    return np.clip(share, np.minimum(denser, 1), lines - np.minimum(sparser, 1))


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    lines, each = machine.stations["lines"].width, int(machine.number("line"))
    width, bits = layer.width, machine.number("bits")
    global_tokens, sparser = split_pairs(layer.kept(), int(machine.number("global_tokens")))
    denser = global_tokens * layer.unit_queries
    of_denser = shared_lines(denser, sparser, lines)
    of_sparser = lines - of_denser
    code = int(np.ceil(layer.heads * machine.number("code"))) if machine.settings["coded"] else 0
    vectors = layer.unit_queries + layer.unit_keys
    decoded = vectors * width * code
    depth = -(-width // each)
    # K stays: a query at each line of the denser part, a pair at each of the sparser one
    scores = np.maximum(
        global_tokens * ceil_div(layer.unit_queries, np.maximum(of_denser, 1)) * depth,
        ceil_div(sparser, np.maximum(of_sparser, 1)) * depth,
    )
    values = np.maximum(
        ceil_div(denser * width, np.maximum(of_denser, 1) * each),
        ceil_div(sparser * width, np.maximum(of_sparser, 1) * each),
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
    notes = ["ViTCoD: softmax is not modelled, as in its released simulator"]
    operands = layer.keys * layer.width * machine.number("bits") / 8
    if operands > machine.size("operands"):
        notes.append(f"ViTCoD's memories do not hold the {layer.keys} keys of a head: they would be read again")
    return tuple(notes)


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["lines"].width * int(machine.number("line"))


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """More or fewer lines."""
    before = machine.stations["lines"]
    stations = {"lines": replace(before, width=budget // int(machine.number("line")))}
    modules = machine.scaled_modules({"lines": stations["lines"].width / before.width})
    return replace(machine, stations=stations, modules=modules)


def two_lines(machine: AcceleratorSpec) -> int:
    """Multipliers of the smallest machine: both parts need a line."""
    return 2 * int(machine.number("line"))


SETTINGS = {"line": 8, "global_tokens": 50, "coded": True, "code": 0.5, "bits": 8, "index_bits": 8}
SIZES = ("line", "bits", "index_bits")
DESIGN = AcceleratorDesign("vitcod", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, two_lines, grows=True)


def released_linear_cycles(tokens: int, heads: int, layers: int) -> tuple[int, int]:
    """Cycles by the rules of the released simulator, with heads of 64: of the projections around attention, and of the
    two layers after it."""
    width, multipliers = heads * 64, 512
    share = multipliers // heads
    projections = 3 * tokens * (width * 64 // share) + tokens * width * 64 // share
    return layers * projections, layers * 2 * (4 * tokens * width**2 // multipliers)
