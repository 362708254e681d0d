"""ELSA (Ham et al. 2021): select keys by hash similarity before computing scores.

Paper       Ham et al. 2021, ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention Mechanism in
            Neural Networks (ISCA 2021), table 1 and section IV.
Promise     Scores are computed for selected keys only. Key selection and attention overlap in time.
Use         thrifty.trace("power-law", "trace.safetensors", density=0.1, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["elsa", "elsa:approximate=false"], measure=False)
Start with  `elsa`; `elsa:copies=12` is the size that the paper compares with one V100. `elsa:approximate=false`
            scores all keys and computes no hashes.
Cost        All n keys are hashed before the first query: 3·d^(4/3)·(n + 1) multiplications at head width d.
Avoid       Sequences of more than `most_keys` (512) keys, because area and power are published for 512 keys.
Does not    Reproduce the paper's assignment of keys to banks, which is not published; the simulation interleaves the
            keys."""

from dataclasses import replace

import numpy as np

from thrifty.kernels.attention_filters.elsa_filter import factor_sizes, multiplies
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("hash", "attend", "divide")


def hash_multiplications(width: int) -> int:
    """Return the number of multiplications to hash a vector of width d with Kronecker factors: 768 at d = 64."""
    return multiplies(factor_sizes(width))


def preprocessing_cycles(keys: np.ndarray, width: int, multipliers: int) -> np.ndarray:
    """Return the cycles to hash n keys and the first query: 3·(n + 1) at d = 64 with 256 multipliers."""
    return ceil_div(hash_multiplications(width) * (keys + 1), multipliers)


def bank_counts(kept: np.ndarray, banks: int) -> np.ndarray:
    """Return the number of kept keys (units, queries, banks) per query and bank. Key j is in bank j mod `banks`."""
    missing = -kept.shape[-1] % banks
    padded = np.pad(kept, ((0, 0), (0, 0), (0, missing)))
    return padded.reshape(*kept.shape[:2], -1, banks).sum(2, dtype=np.int64)


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per query of a layer. Each item passes the stations for hash, selection with attention, and
    division.

    Each bank of keys has candidate selectors and one attention module that processes a key per cycle. While one query
    attends, the next query is hashed and the previous query is divided. Without `approximate`, all keys are scored and
    nothing is hashed.

    A query takes max(3·d^(4/3) / hash width, n / (banks · selectors), keys of the fullest bank, d / divide width)
    cycles. Hashing before the first query takes 3·d^(4/3)·(n + 1) / hash width cycles. Modules and selectors split
    heads wider than `head_width` into parts of `head_width`. In the paper, all heads have this width.
    """
    approximate = bool(machine.settings["approximate"])
    banks, width = machine.stations["attend"].width, layer.width
    hashing, dividing = (machine.stations[name].width for name in ("hash", "divide"))
    each, parts = layer.unit_keys[:, None], -(-width // int(machine.number("head_width")))
    if approximate:
        counts = bank_counts(layer.kept(), banks)
        fullest, kept = counts.max(-1), counts.sum(-1)
        selecting = ceil_div(each, banks * int(machine.number("selectors"))) * parts
        hashed = np.full((layer.units, layer.queries), ceil_div(np.array(hash_multiplications(width)), hashing))
        hashed[:, 0] = 0  # the first query is hashed with the keys, before the first item
        lead = preprocessing_cycles(layer.unit_keys, width, hashing)
    else:
        fullest = np.broadcast_to(ceil_div(each, banks), (layer.units, layer.queries))
        kept = np.broadcast_to(each, fullest.shape)
        selecting, hashed, lead = np.int64(1), np.zeros_like(fullest), np.zeros_like(layer.unit_keys)
    attended = np.maximum(fullest * parts, selecting)
    divided = np.full_like(attended, -(-width // dividing))
    service = np.stack([layer.per_query(cycles) for cycles in (hashed, attended, divided)])
    computed = float(layer.per_query(kept).sum())
    read, written = operand_bytes(layer, machine.number("bits"))
    pairs = float((layer.unit_queries * layer.unit_keys).sum()) if approximate else 0.0
    return ItemStream(
        service=service,
        macs=2 * computed * width,
        lead=lead,
        read=read,
        written=written,
        active={
            "hash": float(service[0].sum() + lead.sum()),
            "select": parts * pairs / (banks * machine.number("selectors")),
            "attend": parts * computed / banks,
            "norm": parts * float(layer.unit_keys.sum()) if approximate else 0.0,
        },
        operations=_operations(layer, machine, computed, pairs),
        notes=_notes(layer, machine),
    )


def _operations(layer: AttentionLayer, machine: AcceleratorSpec, kept: float, pairs: float) -> Operations:
    bits, width = int(machine.number("bits")), layer.width
    queries, keys = float(layer.unit_queries.sum()), float(layer.unit_keys.sum())
    hashed = queries + keys if pairs else 0.0
    operand_memory = machine.size("operands")
    return add_up(
        multiply_accumulate(hashed * hash_multiplications(width), bits),
        multiply_accumulate(keys * width if pairs else 0.0, bits),  # norms
        # compare the hashes of a query and a key: 64 XORs, their count, a cosine from a table, a product, a comparison
        {
            PricedOperation("int_add", width): 2 * pairs,
            PricedOperation("int_multiply", 8): pairs,
            PricedOperation("int_add", 16): pairs,
        },
        {PricedOperation("sram", width + 8, 4096): pairs + keys * bool(pairs)},
        multiply_accumulate(2 * kept * width, bits),
        {PricedOperation("sram", width * bits, operand_memory): 2 * kept + 2 * queries},
        # in 16-bit floats: an exponential by table and product, and a product with the reciprocal of the sum
        {PricedOperation("float_multiply", 16): kept + queries * width, PricedOperation("float_add", 16): kept},
    )


def _notes(layer: AttentionLayer, machine: AcceleratorSpec) -> tuple[str, ...]:
    most = machine.number("most_keys")
    if layer.keys <= most:
        return ()
    return (f"ELSA: area and power are published for {most:.0f} keys; the trace has {layer.keys}",)


def multipliers(machine: AcceleratorSpec) -> int:
    """Return the number of multipliers for scores and values: 2·d per bank at head width d.

    A budget of multipliers excludes hash and division.
    """
    return 2 * int(machine.number("head_width")) * machine.stations["attend"].width


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with fewer banks. Hash and division shrink in proportion."""
    banks, before = budget // bank(machine), machine.stations["attend"].width
    modules = machine.scaled_modules(dict.fromkeys((*STATIONS, "select"), banks / before))
    return replace(machine, stations=machine.scaled_stations(banks, before), modules=modules)


def bank(machine: AcceleratorSpec) -> int:
    """Return the number of multipliers per bank."""
    return 2 * int(machine.number("head_width"))


SETTINGS = {"approximate": True, "selectors": 8, "head_width": 64, "bits": 9, "most_keys": 512}
SIZES = ("selectors", "head_width", "bits", "most_keys")
DESIGN = AcceleratorDesign(
    "elsa", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, bank, activities=("select", "norm")
)
