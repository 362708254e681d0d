"""DOTA (Qu et al. 2022): omit weak pairs and share fetched keys among queries.

Paper       Qu et al. 2022, DOTA: Detect and Omit Weak Attentions for Scalable Transformer Acceleration (ASPLOS 2022).
            Only the abstract was read. All sizes are recalled, not checked against the paper.
Promise     Only kept pairs are computed. If several queries of a group keep a key, the key is fetched once.
Use         thrifty.trace("balanced", "trace.safetensors", density=0.1, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["dota", "dota:reordered=false"], measure=False)
Start with  `dota`. `dota:reordered=false` fetches keys in order; `dota:approximate=false` computes all pairs.
Cost        A low-precision detector runs on the same multipliers before attention.
Avoid       Masks with unequal keys per query, because a group takes as long as its query with the most keys.
Does not    Train the detector, simulate linear layers, or reproduce the abstract's speedup of 152.6× (attention alone,
            at about the GPU's peak)."""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("fetch", "attend")


def grouped(kept: np.ndarray, lanes: int) -> np.ndarray:
    """Group neighboring queries of masks (units, queries, keys). Return (units, groups, lanes, keys), one lane per
    query of a group.
    """
    padded = np.pad(kept, ((0, 0), (0, -kept.shape[1] % lanes), (0, 0)))
    return padded.reshape(kept.shape[0], -1, lanes, kept.shape[-1])


def shared_fetches(groups: np.ndarray) -> np.ndarray:
    """Return the number of fetched keys per group (units, groups) if the order is free: the union over the queries."""
    return groups.any(2).sum(-1, dtype=np.int64)


def ordered_fetches(groups: np.ndarray) -> np.ndarray:
    """Return the number of fetched keys per group (units, groups) if each query fetches its kept keys in order.

    Two queries share a fetch if the same key has the same position in both of their lists.
    """
    place = np.where(groups, groups.cumsum(-1), 0)
    fetched = np.zeros(groups.shape[:2], dtype=np.int64)
    for lane in range(groups.shape[2]):
        earlier = (place[:, :, :lane] == place[:, :, lane : lane + 1]).any(2)
        fetched += (groups[:, :, lane] & ~earlier).sum(-1)
    return fetched


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per group of queries. Each item passes the stations for fetch and attention.

    A group has one query per lane; a lane is a set of `lane` multipliers. A shared key is fetched once and broadcast.
    Keys that more queries share come first. Without `reordered`, each query fetches its keys in order, and simultaneous
    fetches of the same key are shared. The query with the most kept keys determines the cycles of its group.

    The detector runs on the same multipliers: a multiplier of `bits` computes (`bits` / `detected_bits`)² detector
    products. Exponentials (16 per lane and cycle) are never the limit and are omitted, as are linear layers. The sizes
    and the four lanes are recalled, not checked against the paper. No result is compared with a published time;
    `iso_peak.py` explains the ratio at equal peak.
    """
    lanes, width, bits = machine.stations["attend"].width, layer.width, int(machine.number("bits"))
    each, kept = int(machine.number("lane")), layer.kept()
    if not machine.settings["approximate"]:
        real = np.arange(layer.keys) < layer.unit_keys[:, None]
        kept = kept.any(-1, keepdims=True) & real[:, None, :]
    groups = grouped(kept, lanes)
    fetched = shared_fetches(groups) if machine.settings["reordered"] else ordered_fetches(groups)
    longest = groups.sum(-1, dtype=np.int64).max(-1)
    present = longest > 0
    reduced = int(np.ceil(machine.number("reduction") * width)) if machine.settings["approximate"] else 0
    faster = (bits // int(machine.number("detected_bits"))) ** 2
    detecting = ceil_div(layer.unit_keys * reduced, each * faster)[:, None] * present
    attending = ceil_div(2 * longest * width, each)
    service = np.stack([ceil_div(fetched, machine.stations["fetch"].width), detecting + attending]).astype(np.int64)
    computed = float(kept.sum())
    read, written = operand_bytes(layer, bits)
    return ItemStream(
        service=service,
        macs=2 * computed * width,
        read=read,
        written=written,
        active={"detect": float(detecting.sum())},
        operations=_operations(layer, machine, computed, float(fetched.sum()), reduced),
        notes=("DOTA: all sizes are recalled, not checked against the paper",),
    )


def _operations(
    layer: AttentionLayer, machine: AcceleratorSpec, kept: float, fetched: float, reduced: int
) -> Operations:
    bits, width = int(machine.number("bits")), layer.width
    queries, pairs = float(layer.unit_queries.sum()), float((layer.unit_queries * layer.unit_keys).sum())
    memory = machine.size("operands")
    return add_up(
        multiply_accumulate(pairs * reduced, int(machine.number("detected_bits")), 16),
        {PricedOperation("int_add", 16): pairs * bool(reduced)},
        multiply_accumulate(2 * kept * width, bits),
        {PricedOperation("sram", width * bits, memory): 2 * fetched + 2 * queries},
        {PricedOperation("float_multiply", 32): kept + queries * width, PricedOperation("float_add", 32): kept},
    )


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["attend"].width * int(machine.number("lane"))


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with `budget` multipliers in the same number of lanes."""
    modules = machine.scaled_modules({"attend": budget / multipliers(machine)})
    return replace(machine, settings={**machine.settings, "lane": budget // lanes(machine)}, modules=modules)


def lanes(machine: AcceleratorSpec) -> int:
    return machine.stations["attend"].width


SETTINGS = {"approximate": True, "reordered": True, "lane": 512, "reduction": 0.2, "detected_bits": 4, "bits": 16}
SIZES = ("lane", "detected_bits", "bits")
DESIGN = AcceleratorDesign(
    "dota", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, lanes, activities=("detect",)
)
