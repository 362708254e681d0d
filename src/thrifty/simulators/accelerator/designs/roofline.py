"""Roofline (Williams et al. 2009): bound a processor by its peak and bandwidth.

Paper       Williams et al. 2009, Roofline: An Insightful Visual Performance Model for Multicore Architectures
            (Communications of the ACM 52).
Promise     A layer takes the longer of two times: operations at peak, and bytes at full bandwidth.
Use         thrifty.trace("uniform", "trace.safetensors", density=0.2, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["h100", "cpu"], measure=False)
Start with  `h100`, `v100`, `tpu-v1` or `cpu`: these assume the full peak, so the time is a lower bound.
            `h100:efficiency=0.5` assumes half of the peak.
Cost        All query-key pairs are computed. With `fused=false`, the scores are written and read twice.
Avoid       Treating the result as a measured time, because only peak and bandwidth limit it.
Does not    Use masks, or skip padding unless `padded=false`."""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, whole_cycles
from thrifty.simulators.accelerator.priced_operations import PricedOperation, add_up

STATIONS = ("device",)


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item for each head of each example, with its minimum time.

    With `padded`, every example has the length of the longest, as in libraries without variable lengths. Without
    `fused`, two kernels write and read the scores: the score product and softmax. `efficiency` is the assumed fraction
    of the peak.
    """
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
    """Return a device with `budget` multipliers and the same bandwidth. The power of the device is unknown."""
    stations = {"device": replace(machine.stations["device"], width=2 * budget)}
    return replace(machine, stations=stations, modules={})


SETTINGS = {"efficiency": 1.0, "bits": 32, "fused": True, "padded": True}
DESIGN = AcceleratorDesign("roofline", STATIONS, lower, multipliers, SETTINGS, (), resized, grows=True)
