"""Roofline: a processor by its peak and its bandwidth alone (Williams et al. 2009).

A layer takes the longer of its operations at the peak and its bytes at the bandwidth. All pairs are computed, at the
length of the longest example where `padded`, as libraries without variable lengths do; unless `fused`, the scores are
written and read twice, by softmax and by the product with values. `efficiency` is the share of the peak that is
reached; 1 is a bound.
"""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, whole_cycles
from thrifty.simulators.accelerator.priced_operations import PricedOperation, add_up

STATIONS = ("device",)


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    queries, keys = layer.unit_queries, layer.unit_keys
    if machine.settings["padded"]:
        queries, keys = np.full_like(queries, layer.queries), np.full_like(keys, layer.keys)
    each = machine.number("bits") / 8
    operations = 4 * queries * keys * layer.width
    written = queries * layer.width * each
    moved = (queries + 2 * keys) * layer.width * each + written
    if not machine.settings["fused"]:
        written = written + 2 * queries * keys * each
        moved = moved + 4 * queries * keys * each
    computing = operations / (machine.stations["device"].width * machine.number("efficiency"))
    moving = moved / machine.memories.get("dram", AcceleratorMemory("dram")).bandwidth * machine.clock
    bits = int(machine.number("bits"))
    macs = float(operations.sum()) / 2
    return ItemStream(
        service=whole_cycles(np.maximum(computing, moving))[None, :, None],
        macs=macs,
        read=moved - written,
        written=written,
        overlapped=True,
        operations=add_up({PricedOperation("float_multiply", bits): macs, PricedOperation("float_add", bits): macs}),
    )


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["device"].width // 2


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """A device with so many multipliers and the same bandwidth; its power is not known then."""
    stations = {"device": replace(machine.stations["device"], width=2 * budget)}
    return replace(machine, stations=stations, modules={})


SETTINGS = {"efficiency": 1.0, "bits": 32, "fused": True, "padded": True}
DESIGN = AcceleratorDesign("roofline", STATIONS, lower, multipliers, SETTINGS, (), resized, grows=True)
