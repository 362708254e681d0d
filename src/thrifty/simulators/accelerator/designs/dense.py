"""Dense (no paper): compute every query-key pair, as the baseline of other designs.

Paper       None. The design is an idealized baseline, not a real chip.
Promise     Multipliers are never idle: each cycle has data. Pipeline fill and drain cost nothing.
Use         thrifty.trace("uniform", "trace.safetensors", density=0.2, examples=1, heads=2)
            result = thrifty.simulate.attention("trace.safetensors", ["dense"], measure=False)
Start with  `dense`. To compare with another design, add `equal_resources={"multipliers": 128}`.
Cost        All query-key pairs are computed, because the mask is ignored.
Avoid       Comparisons of area or power, because both are unknown. Use energy from counted operations (`energy_table`).
Does not    Use masks, or simulate the fill and drain of an array, unlike `systolic`."""

from dataclasses import replace

import numpy as np

from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionLayer
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ceil_div, operand_bytes
from thrifty.simulators.accelerator.priced_operations import PricedOperation, add_up, multiply_accumulate

STATIONS = ("score", "softmax", "value")


def lower(layer: AttentionLayer, machine: AcceleratorSpec) -> ItemStream:
    """Return one item per query of a layer. Each item passes the stations for scores, softmax and values."""
    keys = layer.unit_keys[:, None]
    widths = {name: machine.stations[name].width for name in STATIONS}
    widths["softmax"] = max(widths["softmax"], -(-widths["score"] // layer.width))
    cycles = [ceil_div(keys * layer.width, widths["score"]), ceil_div(keys, widths["softmax"])]
    cycles.append(ceil_div(keys * layer.width, widths["value"]))
    pairs = float((layer.unit_queries * layer.unit_keys).sum())
    read, written = operand_bytes(layer, machine.number("bits"))
    bits, memory = int(machine.number("bits")), machine.size("operands")
    return ItemStream(
        service=np.stack([layer.per_query(each) for each in cycles]),
        macs=2 * pairs * layer.width,
        read=read,
        written=written,
        operations=add_up(
            multiply_accumulate(2 * pairs * layer.width, bits),
            {PricedOperation("sram", layer.width * bits, memory): 2 * pairs + 2 * float(layer.unit_queries.sum())},
            {
                PricedOperation("float_multiply", 16): pairs + written.sum() * 8 / bits,
                PricedOperation("float_add", 16): pairs,
            },
        ),
    )


def multipliers(machine: AcceleratorSpec) -> int:
    return machine.stations["score"].width + machine.stations["value"].width


def resized(machine: AcceleratorSpec, budget: int) -> AcceleratorSpec:
    """Return the machine with half of `budget` for scores, half for values. Softmax handles all scores of a cycle."""
    half = budget // 2
    softmax = max(1, -(-half // int(machine.number("head_width"))))
    widths = {"score": half, "softmax": softmax, "value": half}
    stations = {name: replace(station, width=widths[name]) for name, station in machine.stations.items()}
    return replace(machine, stations=stations)


SETTINGS = {"bits": 16, "head_width": 64}
DESIGN = AcceleratorDesign("dense", STATIONS, lower, multipliers, SETTINGS, (), resized, lambda machine: 2, grows=True)
