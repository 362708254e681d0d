"""ELSA: keys are chosen by hashes before their scores are computed (Ham et al., ISCA 2021).

Keys lie in banks, each with candidate selectors and one attention module that takes a key a cycle. Selection and
attention of a query overlap; hashing the next query and dividing the one before go on beside them. Without
`approximate` every key is computed and nothing is hashed. In which order keys lie over banks is not published: they are
interleaved here.

Cycles of a query are max(3·d^(4/3) / hash width, n / (banks · selectors), keys of the fullest bank, d / divide width),
those before the first 3·d^(4/3)·(n + 1) / hash width. Heads wider than `head_width`, for which modules and selectors
are built, go through them in parts of that width (ours; the paper's heads are all as wide).
"""

from dataclasses import replace

import numpy as np

from thrifty.kernels.attention_filters.elsa_filter import factor_sizes, multiplies
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("hash", "attend", "divide")


def hash_multiplications(width: int) -> int:
    """Of one vector through the filter's Kronecker factors: 3·d^(4/3) = 768 at d = 64."""
    return multiplies(factor_sizes(width))


def preprocessing_cycles(keys: np.ndarray, width: int, multipliers: int) -> np.ndarray:
    """Hashing all keys and the first query: 3·(n + 1) at d = 64 and 256 multipliers."""
    return ceil_div(hash_multiplications(width) * (keys + 1), multipliers)


def bank_counts(kept: np.ndarray, banks: int) -> np.ndarray:
    """(u, t, banks) kept keys of each query in each bank, key j in bank j mod `banks`."""
    missing = -kept.shape[-1] % banks
    padded = np.pad(kept, ((0, 0), (0, 0), (0, missing)))
    return padded.reshape(*kept.shape[:2], -1, banks).sum(2, dtype=np.int64)


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    approximate = bool(machine.settings["approximate"])
    banks, width = machine.stations["attend"].width, layer.width
    hashing, dividing = (machine.stations[name].width for name in ("hash", "divide"))
    each, parts = layer.unit_keys[:, None], -(-width // int(machine.number("head_width")))
    if approximate:
        in_banks = bank_counts(layer.kept(), banks)
        fullest, kept = in_banks.max(-1), in_banks.sum(-1)
        selecting = ceil_div(each, banks * int(machine.number("selectors"))) * parts
        hashed = np.full((layer.units, layer.queries), ceil_div(np.array(hash_multiplications(width)), hashing))
        hashed[:, 0] = 0  # before the first item, with the keys
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
    return (f"ELSA's memories hold {most:.0f} keys; area and power are those, for {layer.keys}",)


def multipliers(machine: AcceleratorSpec) -> int:
    """Of scores and values: 2·d for each bank. Hash and division have others, which a budget does not count."""
    return 2 * int(machine.number("head_width")) * machine.stations["attend"].width


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Fewer banks; what hashes and divides is in proportion to them."""
    banks, before = budget // bank(machine), machine.stations["attend"].width
    modules = machine.scaled_modules(dict.fromkeys((*STATIONS, "select"), banks / before))
    return replace(machine, stations=machine.scaled_stations(banks, before), modules=modules)


def bank(machine: AcceleratorSpec) -> int:
    """Multipliers of a bank."""
    return 2 * int(machine.number("head_width"))


SETTINGS = {"approximate": True, "selectors": 8, "head_width": 64, "bits": 9, "most_keys": 512}
SIZES = ("selectors", "head_width", "bits", "most_keys")
DESIGN = AcceleratorDesign(
    "elsa", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, bank, activities=("select", "norm")
)
