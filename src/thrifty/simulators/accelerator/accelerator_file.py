"""Machine files: `machines/*.toml` or a user's file in the same format, checked against the design of the machine.

As in papers, areas are in mm² and powers in mW. All other values are in SI units."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.core.plain_values import build, convert, parse_toml
from thrifty.simulators.accelerator.accelerator_spec import (
    AcceleratorMemory,
    AcceleratorSpec,
    ChipModule,
    PipelineStation,
)
from thrifty.simulators.accelerator.designs import AcceleratorDesign, find_design

Part = TypeVar("Part")


def machine_names(workload: str | None = None) -> list[str]:
    """Return the names of all built-in machines, or of the machines for a workload ("attention" or "spgemm")."""
    folder = files("thrifty.simulators.accelerator") / "machines"
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    if workload is None:
        return names
    return [name for name in names if find_design(find_machine(name).design).workload == workload]


def find_machine(name: str) -> AcceleratorSpec:
    """Return a built-in machine by name, or the machine of a TOML file by path. Raises UsageError for an unknown name
    or an invalid file."""
    if name.endswith(".toml"):
        return read_machine(Path(name))
    refuse_unknown("there is no machine", name, machine_names())
    return _packaged(name)


def changed_machine(words: str) -> AcceleratorSpec:
    """Return the machine of `NAME` or `NAME:KEY=VALUE:KEY=VALUE`. A changed machine has the name `words`."""
    name, *assignments = words.strip().split(":")
    machine = find_machine(name)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"{assignment!r} is not KEY=VALUE", fix=f"for example {name}:copies=2")
        machine = replace(machine.replaced(path.strip(), value.strip()), name=words.strip())
    return machine


def changed_machines(designs: Sequence[str]) -> list[AcceleratorSpec]:
    """Return the machine of each text, as in `changed_machine`. Raises UsageError if `designs` is empty or has
    duplicates.
    """
    if not designs:
        raise UsageError("the list of designs is empty", fix="for example elsa, a3 or dense")
    machines = [changed_machine(words) for words in designs]
    names = [machine.name for machine in machines]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{twice[0]!r} is named twice", fix="name it once, or change a value, as in elsa:copies=2")
    return machines


@cache
def _packaged(name: str) -> AcceleratorSpec:
    text = (files("thrifty.simulators.accelerator") / "machines" / f"{name}.toml").read_text(encoding="utf-8")
    return machine_from(name, tomllib.loads(text))


def read_machine(path: Path) -> AcceleratorSpec:
    """Return the machine of a file. Raises UsageError if the file is invalid.

    If the file has the modules of a built-in machine, area and power are scaled from the sizes of that machine to the
    sizes in the file.
    """
    try:
        content = parse_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"'{path}' cannot be read as a machine: {error}",
            fix="pass a TOML file with design, clock, source and grade",
        ) from error
    machine = machine_from(path.stem, content)
    published = next((one for one in map(_packaged, machine_names()) if _has_modules_of(machine, one)), None)
    return machine if published is None else _resized(machine, published)


def _has_modules_of(machine: AcceleratorSpec, other: AcceleratorSpec) -> bool:
    def figures(spec: AcceleratorSpec) -> dict[str, tuple[str, float, float, float]]:
        return {name: (part.active, part.area, part.dynamic, part.static) for name, part in spec.modules.items()}

    return bool(machine.modules) and machine.design == other.design and figures(machine) == figures(other)


def _resized(machine: AcceleratorSpec, published: AcceleratorSpec) -> AcceleratorSpec:
    """Return `machine` with the area and power of `published`, scaled to the sizes of `machine`."""
    sizes, known = machine.values(), published.values()
    changed = replace(published, name=machine.name)
    for path in known.keys() & sizes.keys():
        changed = changed.replaced(path, sizes[path])
    if others := sorted(path for path in known.keys() ^ sizes.keys() if not path.startswith("memories.dram.")):
        changed = changed.without_area(f"{'' if others[0] in known else 'no '}{others[0]}")
    return replace(machine, modules=changed.modules, notes=changed.notes)


def machine_from(name: str, content: Mapping[str, Any]) -> AcceleratorSpec:
    """Return the machine described by parsed TOML. Raises UsageError for unknown, missing or impossible values."""
    if missing := [key for key in ("design", "clock", "source", "grade") if key not in content]:
        raise UsageError(f"machine {name!r} has no {missing[0]!r}", fix=f"add {missing[0]} = … to its file")
    tables = {key: _table(name, key, content.get(key, {})) for key in ("settings", "stations", "memories", "modules")}
    values = {key: value for key, value in content.items() if key not in tables}
    machine = build(AcceleratorSpec, {**values, "name": name}, name)
    design = find_design(machine.design)
    settings, stations, memories, modules = tables.values()
    for key in settings:
        refuse_unknown(f"{name}.settings: unknown key", key, design.settings)
    for key in stations:
        refuse_unknown(f"{name}.stations: unknown station", key, design.stations)
    if missing := [station for station in design.stations if station not in stations]:
        raise UsageError(
            f"machine {name!r} lacks station {missing[0]!r}, which {design.name} requires",
            fix=f"add [stations.{missing[0]}] with width = 1 to its file",
        )
    own = {key: convert(type(design.settings[key]), value, f"{name}.settings.{key}") for key, value in settings.items()}
    return replace(
        machine,
        stations={key: _part(PipelineStation, name, f"stations.{key}", stations[key]) for key in design.stations},
        memories={key: _part(AcceleratorMemory, name, f"memories.{key}", part) for key, part in memories.items()},
        modules={key: _module(key, part, machine, design) for key, part in modules.items()},
        settings={**design.settings, **own},
        sizes=design.sizes,
    )


@dataclass(frozen=True)
class ModuleTable:
    """A module in a machine file. The machine has `count` equal modules; area and power are values of one module."""

    active: str
    count: float = 1.0
    area_mm2: float = 0.0
    dynamic_mw: float = 0.0
    static_mw: float = 0.0
    source: str = ""
    grade: str = ""


def _module(name: str, content: object, machine: AcceleratorSpec, design: AcceleratorDesign) -> ChipModule:
    path = f"modules.{name}"
    part = build(ModuleTable, _table(machine.name, path, content), f"{machine.name}.{path}")
    known = (*design.stations, *design.activities)
    refuse_unknown(f"{machine.name}.{path}: unknown station or activity", part.active, known)
    return ChipModule(
        name,
        part.active,
        area=part.count * part.area_mm2,
        dynamic=part.count * 1e-3 * part.dynamic_mw,
        static=part.count * 1e-3 * part.static_mw,
        clock=machine.clock,
        source=part.source or machine.source,
        grade=part.grade or machine.grade,
    )


def _part(kind: type[Part], machine: str, path: str, content: object) -> Part:
    values = {**_table(machine, path, content), "name": path.partition(".")[2]}
    return build(kind, values, f"{machine}.{path}")


def _table(machine: str, path: str, content: object) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise UsageError(f"{machine}.{path} is {content!r}, not a table", fix=f"write a table [{path}]")
    return content
