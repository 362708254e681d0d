"""ELSA (Ham et al. 2021): select keys by hash similarity before computing scores.

Paper       Ham et al. 2021, ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention Mechanism in
            Neural Networks (ISCA 2021), table 1 and section IV.
Promise     Scores are computed for selected keys only. Selection and attention of a query overlap.
Use         thrifty.trace("power-law", "trace.safetensors", density=0.1, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["elsa", "elsa:approximate=false"], measure=False)
Start with  `elsa`; `elsa:copies=12` is the size that the paper compares with one V100. `elsa:approximate=false`
            computes all keys without hashes.
Cost        Hashing all keys before the first query, 3·d^(4/3)·(n + 1) multiplications of head width d.
Avoid       More keys than the memories hold (`most_keys`, 512): area and power are published for that size.
Does not    Follow a published order of keys in banks, since there is none: keys are interleaved."""

from dataclasses import replace

import numpy as np

from thrifty.kernels.attention_filters.elsa_filter import factor_sizes, multiplies
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("hash", "attend", "divide")


def hash_multiplications(width: int) -> int:
    """Return the multiplications that hash one vector by Kronecker factors: 3·d^(4/3) = 768 at d = 64."""
    return multiplies(factor_sizes(width))


def preprocessing_cycles(keys: np.ndarray, width: int, multipliers: int) -> np.ndarray:
    """Return the cycles to hash all keys and the first query: 3·(n + 1) at d = 64 and 256 multipliers."""
    return ceil_div(hash_multiplications(width) * (keys + 1), multipliers)


def bank_counts(kept: np.ndarray, banks: int) -> np.ndarray:
    """Return the number of kept keys (u, t, banks) of each query in each bank; key j is in bank j mod `banks`."""
    missing = -kept.shape[-1] % banks
    padded = np.pad(kept, ((0, 0), (0, 0), (0, missing)))
    return padded.reshape(*kept.shape[:2], -1, banks).sum(2, dtype=np.int64)


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return the items of a layer: one for each query, through hash, selection with attention, and division.

    Each bank of keys has candidate selectors and one attention module that takes a key per cycle. While a query is
    attended, the next query is hashed and the previous one divided. Without `approximate`, every key is computed and
    nothing is hashed.

    A query takes max(3·d^(4/3) / hash width, n / (banks · selectors), keys of the fullest bank, d / divide width)
    cycles. Before the first query there are 3·d^(4/3)·(n + 1) / hash width cycles. Heads wider than `head_width`, for
    which modules and selectors are built, pass them in parts of that width (our rule: in the paper all heads have it).
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
        # a query's hash against a key's: 64 XORs and their count, a cosine from a table, a product and a comparison
        {
            PricedOperation("int_add", width): 2 * pairs,
            PricedOperation("int_multiply", 8): pairs,
            PricedOperation("int_add", 16): pairs,
        },
        {PricedOperation("sram", width + 8, 4096): pairs + keys * bool(pairs)},
        multiply_accumulate(2 * kept * width, bits),
        {PricedOperation("sram", width * bits, operand_memory): 2 * kept + 2 * queries},
        # an exponential by table and product, and a division by the reciprocal of the sum: floats of 16 bits
        {PricedOperation("float_multiply", 16): kept + queries * width, PricedOperation("float_add", 16): kept},
    )


def _notes(layer: AttentionLayer, machine: AcceleratorSpec) -> tuple[str, ...]:
    most = machine.number("most_keys")
    if layer.keys <= most:
        return ()
    return (f"ELSA: area and power are of memories for {most:.0f} keys; the trace has {layer.keys}",)


def multipliers(machine: AcceleratorSpec) -> int:
    """Return the multipliers of scores and values: 2·d for each bank.

    A budget does not count the multipliers of hash and division.
    """
    return 2 * int(machine.number("head_width")) * machine.stations["attend"].width


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with fewer banks, and hash and division in proportion."""
    banks, before = budget // bank(machine), machine.stations["attend"].width
    modules = machine.scaled_modules(dict.fromkeys((*STATIONS, "select"), banks / before))
    return replace(machine, stations=machine.scaled_stations(banks, before), modules=modules)


def bank(machine: AcceleratorSpec) -> int:
    """Return the multipliers of a bank."""
    return 2 * int(machine.number("head_width"))


SETTINGS = {"approximate": True, "selectors": 8, "head_width": 64, "bits": 9, "most_keys": 512}
SIZES = ("selectors", "head_width", "bits", "most_keys")
DESIGN = AcceleratorDesign(
    "elsa", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, bank, activities=("select", "norm")
)
