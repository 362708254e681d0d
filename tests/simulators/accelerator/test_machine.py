"""Machine files: unknown, missing or impossible values are refused, and every value can be replaced."""

from copy import deepcopy
from importlib.resources import files
from pathlib import Path

import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine, machine_from, machine_names, read_machine
from thrifty.simulators.accelerator.accelerator_simulation import simulate
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.designs import design_names, find_design
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

PLAIN = {
    "design": "dense",
    "clock": 1e9,
    "source": "nobody",
    "grade": "X",
    "stations": {"score": {"width": 4}, "softmax": {"width": 1}, "value": {"width": 4}},
    "memories": {"operands": {"bytes": 1024}},
}


def changed(path: str, value: object) -> dict:
    content = deepcopy(PLAIN)
    *above, last = path.split(".")
    table = content
    for key in above:
        table = table.setdefault(key, {})
    table[last] = value
    return content


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_has_a_design_and_a_source(name: str) -> None:
    machine = find_machine(name)
    assert machine.design in design_names() and tuple(machine.stations) == find_design(machine.design).stations
    assert machine.source and machine.grade in "PRXSM"
    if machine.grade == "M":
        assert "recalled" in machine.source


def test_elsa_area_and_power_of_table_1() -> None:
    modules = find_machine("elsa").modules
    external = [
        module for name, module in modules.items() if "hash" not in name and "memory" in name and "norm" not in name
    ]
    assert sum(module.area for module in external) == pytest.approx(0.892)
    assert sum(module.dynamic for module in external) == pytest.approx(516.84e-3)
    assert sum(module.area for module in modules.values()) == pytest.approx(1.255 + 0.892)
    assert sum(module.dynamic for module in modules.values()) == pytest.approx(956.05e-3 + 516.84e-3)
    assert sum(module.static for module in modules.values()) == pytest.approx((13.31 + 8.02) * 1e-3, rel=2e-3)


def test_a3_area_and_power_of_table_1() -> None:
    modules = find_machine("a3").modules.values()
    assert sum(module.area for module in modules) == pytest.approx(2.082)
    assert sum(module.dynamic for module in modules) == pytest.approx(98.92e-3, rel=1e-3)
    assert sum(module.static for module in modules) == pytest.approx(11.502e-3)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stations.scores.width", 4, "unknown station 'scores'.*\n.*did you mean 'score'"),
        ("stations.score.widht", 4, "unknown key 'plain.stations.score.widht'.*\n.*did you mean 'width'"),
        ("memories.operands.bandwidth", -64e9, "memories.operands: bandwidth is -6.*\n.*at least 1"),
        ("memories.operands.latency", -1, "latency is -1"),
        ("memories.operands.bytes", "many", "bytes must be a number, not 'many'"),
        ("clock", 0, "clock is 0"),
        ("copies", 1.5, "copies must be a whole number, not 1.5"),
        ("stations.score.width", 2.5, "score.width must be a whole number, not 2.5"),
        ("settings.bits", 0, "bits is 0"),
        ("design", "elza", "no design 'elza'.*\n.*did you mean 'elsa'"),
        ("grade", "Q", "grade is 'Q'"),
        ("tiles", 4, "unknown key 'plain.tiles'"),
        ("settings.bit", 8, "plain.settings: unknown key 'bit'.*\n.*did you mean 'bits'"),
        ("settings.bits", "eight", "settings.bits must be a whole number, not 'eight'"),
        ("modules.core.active", "scored", "unknown station or activity 'scored'.*\n.*did you mean 'score'"),
        ("stations.score", 4, r"stations.score is 4.*\n.*\[stations.score\]"),
        ("clock", float("nan"), "clock is nan.*\n.*a finite number"),
        ("clock", float("inf"), "clock is inf.*\n.*finite"),
        ("clock", 0.5, "clock is 0.5.*\n.*at least 1"),
        ("stations.score.width", float("inf"), "score.width must be a whole number, not inf"),
        ("copies", 10**30, "copies has 100 bits"),
        ("copies", True, "copies must be a whole number, not True"),
        ("settings.bits", 0.5, "settings.bits must be a whole number, not 0.5"),
        ("settings.bits", float("inf"), "bits must be a whole number, not inf"),
        ("settings", [1], r"settings is \[1\].*\n.*\[settings\]"),
        ("stations", 3, r"stations is 3.*\n.*\[stations\]"),
        ("design", 3, "design must be text, not 3"),
        ("source", 3, "source must be text, not 3"),
        ("grade", ["X"], r"grade is \['X'\]"),
        ("modules.core", {"active": "score", "count": "two"}, "core.count must be a number, not 'two'"),
        ("modules.core", {"active": "score", "area_mm2": float("nan")}, "area is nan"),
        ("modules.core", {"active": "score", "dynamic_mw": -1}, "dynamic is -0.001.*\n.*at least 0"),
        ("modules.core.active", 3, "core.active must be text, not 3"),
    ],
)
def test_invalid_machine_files_are_refused(path: str, value: object, message: str) -> None:
    machine_from("plain", PLAIN)
    with pytest.raises(UsageError, match=message):
        machine_from("plain", changed(path, value))


def test_missing_stations_are_refused() -> None:
    content = deepcopy(PLAIN)
    del content["stations"]["softmax"]
    with pytest.raises(UsageError, match="lacks station 'softmax'"):
        machine_from("plain", content)


@pytest.mark.parametrize(
    ("memories", "message"),
    [
        ({}, r"lacks memory 'operands', which dense requires.*\n.*\[memories.operands\]"),
        ({"operands": {"banks": 2}}, "has no memories.operands.bytes"),
        ({"operands": {"bytes": 0.5}}, "operands: bytes is 0.5.*\n.*at least 1"),
    ],
)
def test_missing_memories_are_refused(memories: dict, message: str) -> None:
    trace = synthetic_trace("uniform", 0.5, heads=1, tokens=8)
    with pytest.raises(UsageError, match=message):
        simulate(machine_from("plain", {**PLAIN, "memories": memories}), trace)


def test_user_files_of_machines(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(
        'design = "systolic"\nclock = 5e8\nsource = "me"\ngrade = "X"\n[stations.array]\nwidth = 16\n'
        "[memories.operands]\nbytes = 4096\n"
    )
    machine = find_machine(str(own))
    assert (machine.name, machine.clock, machine.settings["dataflow"]) == ("mine", 5e8, "os")
    own.write_text("design = ")
    with pytest.raises(UsageError, match="cannot be read as a machine"):
        read_machine(own)
    with pytest.raises(UsageError, match="did you mean 'elsa'"):
        find_machine("elsaa")


def test_values_are_replaced_by_path() -> None:
    machine = find_machine("elsa")
    assert machine.replaced("stations.hash.width", "64").stations["hash"].width == 64
    assert machine.replaced("approximate", "0").settings["approximate"] is False
    assert machine.replaced("clock", 5e8).clock == 5e8
    assert machine.replaced("memories.operands.bandwidth", "1e9").memories["operands"].bandwidth == 1e9
    assert machine.replaced("modules.attention.dynamic", 1).modules["attention"].dynamic == 1
    assert machine.with_bandwidth(64e9).memories["dram"].bandwidth == 64e9
    for path, value, message in (
        ("stations.hsh.width", 1, "did you mean 'hash'"),
        ("stations.hash.name", 1, "no key 'name'"),
        ("selector", 1, "did you mean 'selectors'"),
        ("stations.hash.width", "2.5", "whole number"),
        ("approximate", "perhaps", "true or false"),
        ("memories.operands.bandwidth", -1, "bandwidth is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            machine.replaced(path, value)


def copied(name: str, folder: Path, old: str, new: str) -> AcceleratorSpec:
    """Return the machine of a copy of a built-in file with one changed line."""
    text = (files("thrifty.simulators.accelerator") / "machines" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / "mine.toml").write_text(text.replace(old, new), encoding="utf-8")
    return find_machine(str(folder / "mine.toml"))


@pytest.mark.parametrize(
    ("name", "path", "line", "factor"),
    [
        ("elsa", "stations.attend.width", "width = 4 ", 2),
        ("elsa", "stations.hash.width", "width = 256 ", 0.5),
        ("sanger", "stations.attend.width", "width = 64          # rows\n", 2),
        ("vitcod", "stations.lines.width", "width = 64", 0.25),
    ],
)
def test_area_and_power_scale_with_station_width(
    name: str, path: str, line: str, factor: float, tmp_path: Path
) -> None:
    machine, station = find_machine(name), path.split(".")[1]
    width = int(machine.stations[station].width * factor)
    own = copied(name, tmp_path, line, f"width = {width}\n")
    for changed in (machine.replaced(path, width), own):
        assert changed.stations[station].width == width
        assert "(assumption)" in changed.notes[0]
        for part, module in machine.modules.items():
            grows = module.active == station and "memory" not in part
            assert changed.modules[part].area == pytest.approx(module.area * (factor if grows else 1))
            assert changed.modules[part].dynamic == pytest.approx(module.dynamic * (factor if grows else 1))


@pytest.mark.parametrize(
    ("name", "path", "value", "old", "new"),
    [
        ("elsa", "bits", 16, "bits = 9", "bits = 16"),
        ("elsa", "memories.operands.bytes", 73728, "bytes = 36864", "bytes = 73728"),
        ("a3", "most_keys", 640, "most_keys = 320", "most_keys = 640"),
        ("dota", "lane", 256, "lane = 512", "lane = 256"),
        ("spatten", "comparators", 8, "comparators = 16", "comparators = 8"),
        ("sanger", "node", 28, "node = 55", "node = 28"),
        ("vitcod", "line", 16, "line = 8", "line = 16"),
    ],
)
def test_area_and_power_are_unknown_for_other_sizes(
    name: str, path: str, value: float, old: str, new: str, tmp_path: Path
) -> None:
    trace = synthetic_trace("uniform", 0.5, heads=1, tokens=64)
    machine = find_machine(name)
    assert machine.area and simulate(machine, trace).energy("activity")
    for changed in (machine.replaced(path, value), copied(name, tmp_path, old, new)):
        result = simulate(changed, trace)
        assert result.area is None and result.energy("activity") is None and result.energy("actions")
        assert any(f"published for {path} = " in note for note in result.notes)


def test_settings_that_are_not_sizes_keep_area_and_power(tmp_path: Path) -> None:
    elsa, spatten = find_machine("elsa"), find_machine("spatten")
    for machine, path, value in (
        (elsa, "approximate", False), (elsa, "copies", 12), (elsa, "clock", 5e8), (elsa, "bits", 9),
        (spatten, "memories.dram.bandwidth", 64e9), (spatten, "again", 0.1),
    ):  # fmt: skip
        changed = machine.replaced(path, value)
        assert changed.modules == machine.modules and not changed.notes
    slower = copied("elsa", tmp_path, "clock = 1e9", "clock = 5e8")
    assert slower.modules == elsa.modules and slower.clock == 5e8


def test_user_figures_are_kept(tmp_path: Path) -> None:
    text = (files("thrifty.simulators.accelerator") / "machines" / "elsa.toml").read_text(encoding="utf-8")
    changed = text.replace("area_mm2 = 0.202", "area_mm2 = 0.3").replace("bits = 9", "bits = 16")
    (tmp_path / "mine.toml").write_text(changed, encoding="utf-8")
    own, elsa = find_machine(str(tmp_path / "mine.toml")), find_machine("elsa")
    assert own.area == pytest.approx(elsa.area - 0.202 + 0.3) and not own.notes
