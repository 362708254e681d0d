"""Simulation of a machine on a workload, layer by layer.

A unit is one head of one example. Its items pass the stations (pipeline stages) in order. Copies of the machine receive
units in round-robin order. If the machine has an outer memory "dram", transfers overlap with computation. The operands
of a unit are read while the previous unit computes. Its outputs are written while the next unit computes. Without an
outer memory, transfers take no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec, PipelineStation
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream
from thrifty.simulators.accelerator.designs import find_design
from thrifty.simulators.accelerator.energy_model import by_actions, by_activity, find_table
from thrifty.simulators.accelerator.event_engine import StationUnit, play
from thrifty.simulators.accelerator.priced_operations import PricedOperation, add_up
from thrifty.simulators.accelerator.scan_engine import bound, scan
from thrifty.simulators.accelerator.simulation_result import LayerResult, SimulationResult, StationTime
from thrifty.simulators.accelerator.spgemm_workload import SpgemmPhase, SpgemmProduct
from thrifty.simulators.accelerator.station_timeline import StationTimeline

ENGINES = ("scan", "event")
BUDGET = ("multipliers", "clock", "bandwidth")


@dataclass(frozen=True)
class LoweredWork:
    """The stream of items of a layer for a design, with the layer's operations without a mask and its density."""

    name: str
    stream: ItemStream
    dense_macs: float
    """Multiply-accumulate operations without a mask."""
    density: float


def simulate(
    machine: AcceleratorSpec,
    trace: AttentionTrace,
    engine: str = "scan",
    table: str = "horowitz-45nm",
    draw: bool = False,
) -> SimulationResult:
    """Simulate a machine on an attention trace.

    The `engine` "scan" models the outer memory by its bandwidth only. The engine "event" also models latency, banks and
    the limit of requests in flight. `table` names the energy table for counted operations. With `draw`, the result has
    a timeline of each layer's first unit.
    """
    lower = _computing(machine, "attention").lower
    work = [
        LoweredWork(
            layer.name,
            lower(layer, machine),
            2 * float((layer.unit_queries * layer.unit_keys).sum()) * layer.width,
            layer.density,
        )
        for layer in trace.layers
    ]
    return run(machine, work, trace.name, engine, table, draw)


def simulate_product(
    machine: AcceleratorSpec, product: SpgemmProduct, table: str = "horowitz-45nm", draw: bool = False
) -> SimulationResult:
    """Simulate a machine on a product of sparse matrices: the multiply phase, then the merge phase. The other arguments
    are as in `simulate`.
    """
    lower = _computing(machine, "spgemm").lower
    phases = {"multiply": product.dense_macs, "merge": 0.0}
    work = [
        LoweredWork(name, lower(SpgemmPhase(product, name), machine), dense_macs, product.density)
        for name, dense_macs in phases.items()
    ]
    return run(machine, work, product.name, table=table, draw=draw)


def _computing(machine: AcceleratorSpec, workload: str) -> AcceleratorDesign:
    design = find_design(machine.design)
    if design.workload != workload:
        raise UsageError(
            f"{machine.name!r} computes '{design.workload}', not '{workload}'",
            fix=f"thrifty simulate {design.workload}",
        )
    return design


def run(
    machine: AcceleratorSpec,
    work: Sequence[LoweredWork],
    name: str,
    engine: str = "scan",
    table: str = "horowitz-45nm",
    draw: bool = False,
) -> SimulationResult:
    """Return the result for the item streams of any workload. The other arguments are as in `simulate`."""
    refuse_unknown("there is no engine", engine, ENGINES)
    layers = tuple(_layer(each, machine, engine, draw) for each in work)
    multipliers = find_design(machine.design).multipliers(machine) * machine.copies
    active = add_up(*(layer.active for layer in layers))
    operations = add_up(*(layer.operations for layer in layers))
    cycles = sum(layer.cycles for layer in layers)
    energies = [by_activity(machine, active, cycles), by_actions(operations, find_table(table))]
    known = tuple(energy for energy in energies if energy is not None)
    notes = dict.fromkeys((*machine.notes, *(note for each in work for note in each.stream.notes)))
    return SimulationResult(machine, name, engine, multipliers, layers, known, tuple(notes))


def limit_resources(machine: AcceleratorSpec, **budget: float) -> AcceleratorSpec:
    """Return the machine with limited resources. Raises UsageError for unknown keys and invalid amounts.

    The keys are "multipliers" (maximum number), "clock" (Hz) and "bandwidth" (bytes/s of the outer memory, for all
    copies together).
    """
    for key, amount in budget.items():
        refuse_unknown("equal resources: there is no budget of", key, BUDGET)
        is_amount = isinstance(amount, int | float) and amount > 0
        if not is_amount or (key == "multipliers" and not float(amount).is_integer()):
            kind = "a whole number" if key == "multipliers" else "a number"
            raise UsageError(f"equal resources: {key} {amount!r} is not {kind} above zero", f"for example {key}=128")
    if "multipliers" in budget:
        machine = find_design(machine.design).scaled(machine, int(budget["multipliers"]))
    if "clock" in budget:
        machine = replace(machine, clock=budget["clock"])
    return machine.with_bandwidth(budget["bandwidth"]) if "bandwidth" in budget else machine


def _layer(work: LoweredWork, machine: AcceleratorSpec, engine: str, draw: bool) -> LayerResult:
    stream = work.stream
    by_events = stream.needs_events or (engine == "event" and stream.transfers)
    played = _played(stream, machine) if by_events else scan(stream.service, machine.buffers)
    units = (played.makespan + stream.lead).astype(np.int64)
    memory = machine.memories.get("dram")
    copies, with_memory, moving = machine.copies, 0, 0
    if memory is not None and not stream.overlapped:
        copies, with_memory, moving = _with_memory(units, stream, memory, machine, engine)
    without_memory = int(_assigned(units, copies).sum(1).max(initial=0))
    cycles = max(without_memory, with_memory)
    outer = stream.read.sum() + stream.written.sum() if memory is not None else 0.0
    stations = {
        name: StationTime(*(float(getattr(played, kind)[number].sum()) for kind in ("busy", "starved", "blocked")))
        for number, name in enumerate(machine.stations)
    }
    servers = [stream.servers.get(name, 1) for name in machine.stations]
    least = _assigned(bound(stream.service, servers) + stream.lead, copies).sum(1).max(initial=0)
    return LayerResult(
        name=work.name,
        units=len(units),
        cycles=cycles,
        bound=max(int(least), moving),
        waiting=cycles - without_memory,
        stations=stations,
        read=float(stream.read.sum()),
        written=float(stream.written.sum()),
        macs=stream.macs,
        dense_macs=work.dense_macs,
        operations=add_up(stream.operations, {PricedOperation("dram", 8): outer}),
        active={**{name: time.busy for name, time in stations.items()}, **stream.active},
        density=work.density,
        example=_first(played) if draw else None,
    )


def _played(stream: ItemStream, machine: AcceleratorSpec) -> StationTimeline:
    memories, parts = list(machine.memories.values()), []
    for unit in range(stream.service.shape[1]):
        places = [_place(stream, station, number, unit) for number, station in enumerate(machine.stations.values())]
        parts.append(play(places, memories, machine.clock))
    start, end, free = (np.concatenate([getattr(p, k) for p in parts], axis=1) for k in ("start", "end", "free"))
    return StationTimeline(start, end, free, parts[0].servers)


def _place(stream: ItemStream, station: PipelineStation, number: int, unit: int) -> StationUnit:
    servers, window = (counts.get(station.name, 1) for counts in (stream.servers, stream.windows))
    place = StationUnit(service := stream.service[number, unit], station.buffer, servers, window)
    moved = stream.transfers.get(station.name)
    if moved is None:
        return place
    banks = None if moved.banks is None else moved.banks[unit]
    return replace(place, service=service * 0, memory=moved.memory, bytes=moved.bytes[unit], banks=banks)


def _with_memory(
    units: np.ndarray, stream: ItemStream, memory: AcceleratorMemory, machine: AcceleratorSpec, engine: str
) -> tuple[int, int, int]:
    """Return the number of copies in use, the cycles of the slowest copy, and the cycles of transfers alone.

    If copies share the memory, the number of copies in use is the number with the shortest time.
    """
    most = max(min(machine.copies, len(units)), 1)
    if memory.shared:
        whole = memory.bandwidth * machine.copies
        shares = [(copies, replace(memory, bandwidth=whole / copies)) for copies in range(most, 0, -1)]
        most, memory = min(shares, key=lambda share: _scanned(units, stream, share[1], machine.clock, share[0]))
    cycles, moving = _scanned(units, stream, memory, machine.clock, most)
    if engine == "event":
        cycles = _played_copies(units, stream, memory, machine.clock, most)
    return most, cycles, moving


def _scanned(
    units: np.ndarray, stream: ItemStream, memory: AcceleratorMemory, clock: float, copies: int
) -> tuple[int, int]:
    """Return the cycles of the slowest of `copies` copies in the scan engine, and the cycles of transfers alone."""
    per_byte = clock / memory.bandwidth
    read, written = (_assigned(moved, copies) for moved in (stream.read, stream.written))
    moving = int(np.ceil((read + written).sum(1).max() * per_byte - 1e-6))
    whole = [np.ceil(moved * per_byte - 1e-6).astype(np.int64) for moved in (read, written)]
    service = np.stack([whole[0], _assigned(units, copies), whole[1]])
    return max(int(scan(service, (1, 1)).makespan.max()), moving), moving


def _played_copies(units: np.ndarray, stream: ItemStream, memory: AcceleratorMemory, clock: float, copies: int) -> int:
    """Return the cycles of the slowest of `copies` copies in the event engine."""
    read, working, written = (_assigned(each, copies) for each in (stream.read, units, stream.written))
    idle = np.zeros_like(working[0])
    return max(
        int(
            play(
                [
                    StationUnit(idle, 1, memory=memory.name, bytes=read[copy]),
                    StationUnit(working[copy], 1),
                    StationUnit(idle, memory=memory.name, bytes=written[copy]),
                ],
                [memory],
                clock,
            ).makespan[0]
        )
        for copy in range(len(working))
    )


def _assigned(units: np.ndarray, copies: int) -> np.ndarray:
    """Assign the cycles or bytes of units (units,) to copies in round-robin order. Return (copies, ⌈units/copies⌉),
    padded with zeros.

    Copies without a unit are omitted.
    """
    copies = min(copies, len(units))
    return np.pad(units, (0, -len(units) % copies)).reshape(-1, copies).T


def _first(timeline: StationTimeline) -> StationTimeline:
    one = slice(0, 1)
    return StationTimeline(timeline.start[:, one], timeline.end[:, one], timeline.free[:, one], timeline.servers)
