"""DOTA: weak pairs are detected at low precision and left out; queries are worked on together, and share the keys that
several of them keep (Qu et al., ASPLOS 2022).

Queries go through the lanes in groups, one query to a lane. A key that several queries of a group keep is fetched once
and broadcast, in the order that serves most queries first; with `reordered` off, lanes fetch their own next keys in
order and share those that happen to coincide. A group takes as long as the lane with most keys, which is why the
detector is to keep the same number for each query. The detector runs on the same multipliers, each of 16 bits doing
(16 / bits)² products of few bits. Exponentials, 16 a lane and cycle, never limit and are left out, as are the linear
layers.

The 152.6 times over a GPU of the abstract are of attention alone at about the GPU's peak: see `iso_peak.py`. Only the
abstract was read; all sizes, and that lanes and the queries of a group are the same four, are from memory and
unverified. Nothing it gives is compared with a published time.
"""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import Operations, PricedOperation, add_up, multiply_accumulate

STATIONS = ("fetch", "attend")


def grouped(kept: np.ndarray, lanes: int) -> np.ndarray:
    """Masks (u, t, s) as groups of neighbouring queries, (u, groups, lanes, s)."""
    padded = np.pad(kept, ((0, 0), (0, -kept.shape[1] % lanes), (0, 0)))
    return padded.reshape(kept.shape[0], -1, lanes, kept.shape[-1])


def shared_fetches(groups: np.ndarray) -> np.ndarray:
    """(u, g) keys that are fetched when any order is allowed: the union of a group's sets."""
    return groups.any(2).sum(-1, dtype=np.int64)


def ordered_fetches(groups: np.ndarray) -> np.ndarray:
    """(u, g) keys that are fetched when each lane takes its own in order, one at a time, and equal ones are shared.

    A key of one query is shared with another's where it comes at the same place in both: a fetch is a key at a place.
    """
    place = np.where(groups, groups.cumsum(-1), 0)
    fetched = np.zeros(groups.shape[:2], dtype=np.int64)
    for lane in range(groups.shape[2]):
        earlier = (place[:, :, :lane] == place[:, :, lane : lane + 1]).any(2)
        fetched += (groups[:, :, lane] & ~earlier).sum(-1)
    return fetched


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
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
        notes=("DOTA: all sizes are from memory and unverified",),
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
    """Lanes of fewer multipliers: a group stays of as many queries."""
    modules = machine.scaled_modules({"attend": budget / multipliers(machine)})
    return replace(machine, settings={**machine.settings, "lane": budget // lanes(machine)}, modules=modules)


def lanes(machine: AcceleratorSpec) -> int:
    return machine.stations["attend"].width


SETTINGS = {"approximate": True, "reordered": True, "lane": 512, "reduction": 0.2, "detected_bits": 4, "bits": 16}
SIZES = ("lane", "detected_bits", "bits")
DESIGN = AcceleratorDesign(
    "dota", STATIONS, lower, multipliers, SETTINGS, SIZES, resized, lanes, activities=("detect",)
)
