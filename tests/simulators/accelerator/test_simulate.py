"""Whole simulations: equal resources, memory, both engines, simulation time, and exported files."""

import csv
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine, machine_names
from thrifty.simulators.accelerator.accelerator_simulation import ENGINES, LoweredWork, limit_resources, run, simulate
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec, PipelineStation
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign, ItemStream, ItemTransfer
from thrifty.simulators.accelerator.designs import design_names
from thrifty.simulators.accelerator.result_export import action_counts, perfetto, write_csv, write_perfetto
from thrifty.simulators.accelerator.simulation_result import frame
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

TRACE = synthetic_trace("power-law", 0.2, layers=2, heads=3, lengths=[70, 40])
DESIGNS = ["elsa", "a3", "dense", "systolic", "sanger", "vitcod", "dota", "spatten"]


def bare(name: str) -> AcceleratorSpec:
    """Return a machine without outer memory, and without ViTCoD's compression over heads."""
    machine = find_machine(name)
    memories = {key: memory for key, memory in machine.memories.items() if key != "dram"}
    settings = {**machine.settings, "coded": False} if name == "vitcod" else machine.settings
    return replace(machine, memories=memories, settings=settings)


@pytest.mark.parametrize("name", machine_names("attention"))
def test_every_machine_simulates_the_same_trace(name: str) -> None:
    result = simulate(find_machine(name), TRACE, draw=True)
    assert result.cycles == sum(layer.cycles for layer in result.layers) > 0
    assert 0 < result.utilisation <= 1
    for layer in result.layers:
        assert layer.cycles >= layer.bound
        assert sum(time.busy for time in layer.stations.values()) > 0
        assert layer.example is not None and layer.example.start.shape[1] == 1
    assert [energy.table for energy in result.energies][-1] == "horowitz-45nm"
    assert result.dense_rate == pytest.approx(
        sum(4 * 2 * 3 * n * n * 64 for n in (70, 40)) / result.seconds
    ) and json.dumps(result.as_dict(), default=str)


@pytest.mark.parametrize("name", DESIGNS)
def test_cycles_scale_with_units_and_copies(name: str) -> None:
    machine = bare(name)
    heads = [simulate(machine, synthetic_trace("balanced", 0.2, heads=count, tokens=48)).cycles for count in (1, 6)]
    copied = simulate(replace(machine, copies=3), synthetic_trace("balanced", 0.2, heads=6, tokens=48)).cycles
    assert heads[1] == pytest.approx(6 * heads[0], rel=0.1) and copied == pytest.approx(heads[1] / 3, rel=0.1)


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("width", [1, 7, 64, 65, 96, 256])
def test_utilisation_never_exceeds_one(name: str, width: int) -> None:
    for tokens, density in ((1, 1.0), (70, 0.9)):
        result = simulate(bare(name), synthetic_trace("uniform", density, heads=3, tokens=tokens, width=width))
        assert 0 < result.utilisation <= 1
        for energy in result.energies:
            assert energy.total > 0


@pytest.mark.parametrize("name", DESIGNS)
def test_a_denser_mask_is_never_faster(name: str) -> None:
    cycles = [
        simulate(find_machine(name), synthetic_trace("runs", d, heads=2, tokens=64)).cycles for d in (0.1, 0.5, 1.0)
    ]
    assert cycles == sorted(cycles)
    if name in ("dense", "systolic"):
        assert cycles[0] == cycles[2]


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("bandwidth", [1e8, 1e10, 1e15])
def test_outer_memory_bounds_the_time(name: str, bandwidth: float) -> None:
    alone, machine = simulate(bare(name), TRACE), limit_resources(bare(name), bandwidth=bandwidth)
    result = simulate(machine, TRACE)
    moved = sum(layer.read + layer.written for layer in result.layers)
    assert result.seconds >= moved / bandwidth * 0.999999
    assert result.cycles >= alone.cycles
    if bandwidth == 1e15:
        assert result.cycles <= alone.cycles + 4 * len(TRACE.layers)
    if bandwidth == 1e8:
        assert result.seconds == pytest.approx(moved / bandwidth, rel=0.15)
    for memory in (
        AcceleratorMemory("dram", bandwidth=bandwidth),
        AcceleratorMemory("dram", bandwidth=bandwidth, latency=1e-6, outstanding=2),
    ):
        played = simulate(replace(machine, memories={**machine.memories, "dram": memory}), TRACE, engine="event")
        assert played.cycles >= result.cycles


def test_only_the_event_engine_models_latency() -> None:
    memory = AcceleratorMemory("dram", bandwidth=64e9, latency=1e-7, outstanding=1)
    machine = find_machine("dense")
    machine = replace(machine, memories={**machine.memories, "dram": memory})
    scanned, played = (simulate(machine, TRACE, engine=engine) for engine in ENGINES)
    first = TRACE.layers[0]
    requests = [int(np.ceil(3 * n * 64 * 2 / 64)) for n in first.unit_queries]
    assert played.cycles - scanned.cycles >= 100 * requests[0]
    assert played.layers[0].waiting > scanned.layers[0].waiting
    with pytest.raises(UsageError, match="did you mean 'event'"):
        simulate(machine, TRACE, engine="events")


def test_stations_can_be_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event engine computes the times of a station that gathers keys through a memory."""
    machine = find_machine("dense")
    machine = replace(
        machine, memories={**machine.memories, "keys": AcceleratorMemory("keys", bandwidth=8e9, latency=2e-8)}
    )

    def lower(layer, machine):
        from thrifty.simulators.accelerator.designs.dense import lower

        stream = lower(layer, machine)
        size = 8 * stream.service[0]
        return replace(stream, transfers={"score": ItemTransfer("keys", size)})

    def find(name: str) -> AcceleratorDesign:
        from thrifty.simulators.accelerator.designs.dense import DESIGN

        return replace(DESIGN, lower=lower)

    monkeypatch.setattr("thrifty.simulators.accelerator.accelerator_simulation.find_design", find)
    small = synthetic_trace("uniform", 0.5, heads=2, tokens=16)
    scanned, played = (simulate(machine, small, engine=engine) for engine in ENGINES)
    assert played.cycles == scanned.cycles + 2 * 16 * 20  # the latency of every item in turn


def test_servers_and_windows_use_the_event_engine() -> None:
    """Items of very different length run on 4 servers, then continue in order or as they arrive."""
    cycles = np.random.default_rng(0).integers(1, 60, (2, 3, 40))
    cycles[1] //= 6
    none = np.zeros(3)
    stream = ItemStream(cycles, 1.0, none, none, servers={"score": 4})
    stations = {name: PipelineStation(name, buffer=0) for name in ("score", "value")}
    machine = replace(find_machine("dense"), stations=stations)
    plain, ordered, loose = (
        run(machine, [LoweredWork("tasks", each, 1.0, 1.0)], "tasks").layers[0]
        for each in (replace(stream, servers={}), stream, replace(stream, windows={"value": 8}))
    )
    assert ordered.cycles < plain.cycles / 3 and loose.stations["value"].starved < ordered.stations["value"].starved
    for result, servers in ((plain, 1), (ordered, 4), (loose, 4)):
        assert result.cycles >= result.bound >= cycles[0].sum() // servers / 3
        time = result.stations["score"]
        assert time.busy == cycles[0].sum() and time.busy + time.starved + time.blocked == servers * result.cycles


def test_equal_resources_for_all_designs() -> None:
    for name in DESIGNS:
        machine = limit_resources(find_machine(name), multipliers=512, clock=5e8, bandwidth=32e9)
        result = simulate(machine, TRACE)
        assert (
            result.multipliers == 512
            and machine.clock == 5e8
            and machine.memories["dram"].bandwidth * machine.copies == 32e9
        )
    for name, budget in (("elsa", 64), ("dense", 1)):
        with pytest.raises(UsageError, match="at least"):
            limit_resources(find_machine(name), multipliers=budget)


@pytest.mark.slow
def test_bert_large_on_all_designs_within_20_seconds() -> None:
    trace = synthetic_trace("uniform", 0.25, layers=24, heads=16, tokens=384)
    began = time.process_time()
    for name in machine_names("attention"):
        assert simulate(find_machine(name), trace).cycles > 0
    assert time.process_time() - began < 20


@pytest.mark.parametrize("name", [name for name in DESIGNS if name != "systolic"])
def test_more_multipliers_or_bandwidth_are_never_slower(name: str) -> None:
    """A systolic array is excluded: as in SCALE-Sim, a larger array takes longer to fill."""
    trace = synthetic_trace("uniform", 0.3, heads=3, lengths=[33, 20], width=16)
    cycles = np.array(
        [
            [
                simulate(limit_resources(find_machine(name), multipliers=budget, bandwidth=bandwidth), trace).cycles
                for budget in (512, 640, 1024, 1500, 3000, 4096, 8192, 16384)
            ]
            for bandwidth in (1e9, 16e9, 64e9, 1e12)
        ]
    )
    assert (np.diff(cycles, axis=1) <= 0).all() and (np.diff(cycles, axis=0) <= 0).all()


def test_every_design_has_a_machine() -> None:
    assert {find_machine(name).design for name in machine_names()} == set(design_names())


def test_exported_files(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    results = [simulate(limit_resources(find_machine(name), bandwidth=1e9), TRACE, draw=True) for name in DESIGNS]
    write_csv(results, tmp_path)
    with (tmp_path / "SUMMARY.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["machine"], int(row["cycles"])) for row in rows] == [(r.machine.name, r.cycles) for r in results]
    with (tmp_path / "a3_COMPUTE_REPORT.csv").open() as file:
        layers = list(csv.DictReader(file))
    assert sum(int(row["Total Cycles"]) for row in layers) == results[1].cycles
    assert (
        sum(int(row["Stall Cycles"]) for row in layers)
        == results[1].cycles - simulate(find_machine("a3"), TRACE).cycles
    )
    for result in results:
        components = yaml.safe_load(action_counts(result))["action_counts"]["local"]
        assert len(components) == len(result.operations) == len({part["name"] for part in components})
        counted = [part["action_counts"][0]["counts"] for part in components]
        assert counted == [round(count) for count in result.operations.values()]


def test_timelines_have_every_item(tmp_path: Path) -> None:
    results = [simulate(find_machine(name), TRACE, draw=True) for name in ("elsa", "dense")]
    write_perfetto(results, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["cat"] == "layer 1"]
    example, before = results[1].layers[1].example, results[1].layers[0].example.makespan[0]
    assert len(slices) == example.start.size
    for event in slices:
        place = (event["tid"], 0, int(event["name"]))
        assert event["ts"] == pytest.approx((before + example.start[place]) / 1e3)
        assert event["dur"] == pytest.approx((example.end - example.start)[place] / 1e3)
    with pytest.raises(UsageError, match="draw=True"):
        perfetto([simulate(find_machine("dense"), TRACE)])


def test_results_as_a_frame() -> None:
    pandas = pytest.importorskip("pandas")
    result = frame([simulate(find_machine(name), TRACE) for name in ("elsa", "a3")])
    assert isinstance(result, pandas.DataFrame) and list(result["machine"]) == ["elsa", "a3"]


def test_frames_without_pandas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"requires pandas.*\n.*pip install pandas"):
        frame([simulate(find_machine("elsa"), TRACE)])


def test_bytes_and_operations_by_hand_calculation() -> None:
    result = simulate(
        limit_resources(find_machine("dense"), bandwidth=1e9), synthetic_trace("uniform", 0.5, heads=1, tokens=10)
    )
    assert (
        result.bytes["outer memory, read"] == 3 * 10 * 64 * 2 and result.bytes["outer memory, written"] == 10 * 64 * 2
    )
    counted = {(operation.kind, operation.bits): count for operation, count in result.operations.items()}
    assert counted["int_multiply", 16] == counted["int_add", 32] == 2 * 10 * 10 * 64
    assert counted["dram", 8] == 4 * 10 * 64 * 2


@pytest.mark.parametrize("name", machine_names("attention"))
def test_copies_share_the_budget_of_bandwidth(name: str) -> None:
    machine = limit_resources(find_machine(name), multipliers=4096, bandwidth=16e9)
    result = simulate(machine, TRACE)
    moved = sum(layer.read + layer.written for layer in result.layers)
    assert moved / result.seconds <= 16e9 * (1 + 1e-6)
