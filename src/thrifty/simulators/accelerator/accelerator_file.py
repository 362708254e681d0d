"""Machine descriptions: `machines/*.toml`, or a file of the same form, checked against the design that they name.

In a file areas are in mm² and powers in mW, as papers print them; all else is in SI units.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.plain_values import parse_toml
from thrifty.simulators.accelerator.accelerator_spec import (
    AcceleratorMemory,
    AcceleratorSpec,
    ChipModule,
    PipelineStation,
    Setting,
)
from thrifty.simulators.accelerator.designs import AcceleratorDesign, find_design

_KEYS = ("design", "clock", "node", "copies", "source", "grade", "about", "settings", "stations", "memories", "modules")
_MODULE = {"area_mm2": ("area", 1.0), "dynamic_mw": ("dynamic", 1e-3), "static_mw": ("static", 1e-3)}


def machine_names(workload: str | None = None) -> list[str]:
    """The machines that come with the package; those for a workload, "attention" or "spgemm"."""
    folder = files("thrifty.simulators.accelerator") / "machines"
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    if workload is None:
        return names
    return [name for name in names if find_design(find_machine(name).design).workload == workload]


def find_machine(name: str) -> AcceleratorSpec:
    """A machine of the package by its name, or a TOML file by its path. Raises UsageError with what is wrong with
    it."""
    if name.endswith(".toml"):
        return read_machine(Path(name))
    if name not in machine_names():
        raise UsageError(f"there is no machine {name!r}", fix=did_you_mean(name, machine_names()))
    return _packaged(name)


@cache
def _packaged(name: str) -> AcceleratorSpec:
    text = (files("thrifty.simulators.accelerator") / "machines" / f"{name}.toml").read_text(encoding="utf-8")
    return machine_from(name, tomllib.loads(text))


def read_machine(path: Path) -> AcceleratorSpec:
    """A machine of a file. Where its modules are those of a machine of the package, their area and power are published
    for that one's sizes. Raises UsageError with what is wrong with it."""
    try:
        content = parse_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a machine: {error}") from error
    machine = machine_from(path.stem, content)
    published = next((one for one in map(_packaged, machine_names()) if _has_modules_of(machine, one)), None)
    return machine if published is None else _resized(machine, published)


def _has_modules_of(machine: AcceleratorSpec, other: AcceleratorSpec) -> bool:
    def figures(of: AcceleratorSpec) -> dict[str, tuple[str, float, float, float]]:
        return {name: (part.active, part.area, part.dynamic, part.static) for name, part in of.modules.items()}

    return bool(machine.modules) and machine.design == other.design and figures(machine) == figures(other)


def _resized(machine: AcceleratorSpec, published: AcceleratorSpec) -> AcceleratorSpec:
    """A machine with the area and power that a published one has in its sizes."""
    wanted, known = machine.values(), published.values()
    changed = replace(published, name=machine.name)
    for path in known.keys() & wanted.keys():
        changed = changed.replaced(path, wanted[path])
    if others := sorted(path for path in known.keys() ^ wanted.keys() if not path.startswith("memories.dram.")):
        changed = changed.without_area(f"{'' if others[0] in known else 'no '}{others[0]}")
    return replace(machine, modules=changed.modules, notes=changed.notes)


def machine_from(name: str, content: Mapping[str, Any]) -> AcceleratorSpec:
    """A machine of what a file says. Raises UsageError for anything unknown, missing or impossible."""
    _known(name, "", content, _KEYS)
    for key in ("design", "clock", "source", "grade"):
        if key not in content:
            raise UsageError(f"machine {name} does not say its {key}", fix=f"add {key} = … to its file")
    for key in ("design", "source", "grade", "about"):
        if not isinstance(content.get(key, ""), str):
            raise UsageError(f"machine {name}: {key} is {content[key]!r}", fix=f'make it text, {key} = "…"')
    for key in ("settings", "stations", "memories", "modules"):
        if not isinstance(content.get(key, {}), Mapping):
            raise UsageError(f"machine {name}: {key} is {content[key]!r}", fix=f"make it a table [{key}]")
    design = find_design(content["design"])
    stations = _parts(name, content, "stations", ("width", "buffer"))
    _known(name, "stations", stations, design.stations, "station")
    if missing := [station for station in design.stations if station not in stations]:
        raise UsageError(f"machine {name} lacks station {missing[0]!r}, which {design.name} needs")
    memories = _parts(
        name, content, "memories", ("bytes", "banks", "ports", "bandwidth", "latency", "outstanding", "burst")
    )
    modules = _parts(name, content, "modules", ("active", "source", "grade", "count", *_MODULE))
    return AcceleratorSpec(
        name=name,
        design=design.name,
        clock=_number(name, "clock", content["clock"]),
        node=_number(name, "node", content.get("node", 0.0)),
        copies=_number(name, "copies", content.get("copies", 1)),
        source=content["source"],
        grade=content["grade"],
        about=content.get("about", ""),
        stations={
            key: PipelineStation(key, **_numbers(name, f"stations.{key}", stations[key])) for key in design.stations
        },
        memories={
            key: AcceleratorMemory(key, **_numbers(name, f"memories.{key}", part)) for key, part in memories.items()
        },
        modules={key: _module(name, key, part, content, design) for key, part in modules.items()},
        settings=_settings(name, content.get("settings", {}), design),
        sizes=design.sizes,
    )


def _module(
    machine: str, name: str, part: Mapping[str, Any], content: Mapping[str, Any], design: AcceleratorDesign
) -> ChipModule:
    active = str(part.get("active", ""))
    _known(machine, f"modules.{name}", [active], (*design.stations, *design.activities), "station or activity")
    count = _number(machine, f"modules.{name}.count", part.get("count", 1))
    values = {
        key: count * scale * _number(machine, f"modules.{name}.{word}", part.get(word, 0.0))
        for word, (key, scale) in _MODULE.items()
    }
    source, grade = (str(part.get(key, content[key])) for key in ("source", "grade"))
    return ChipModule(name, active, clock=float(content["clock"]), source=source, grade=grade, **values)


def _settings(machine: str, values: Mapping[str, Any], design: AcceleratorDesign) -> dict[str, Setting]:
    _known(machine, "settings", values, design.settings)
    return {**design.settings, **{key: _setting(machine, key, values[key], design.settings[key]) for key in values}}


def _setting(machine: str, key: str, value: object, wanted: Setting) -> Setting:
    """A setting as the kind of value that its default is."""
    if isinstance(wanted, (bool, str)):
        if type(value) is not type(wanted):
            raise UsageError(f"machine {machine}: settings.{key} is {value!r}", fix=f"for example {wanted!r}")
        return value  # pyrefly: ignore
    number = _number(machine, f"settings.{key}", value)
    if isinstance(wanted, int) and math.isfinite(number):
        if number != int(number):
            raise UsageError(f"machine {machine}: settings.{key} is {number:g}", fix="it must be a whole number")
        return int(number)
    return float(number)


def _parts(machine: str, content: Mapping[str, Any], kind: str, keys: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    parts = content.get(kind, {})
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            raise UsageError(f"machine {machine}: {kind}.{name} is {part!r}", fix=f"make it a table [{kind}.{name}]")
        _known(machine, f"{kind}.{name}", part, keys)
    return dict(parts)


def _known(machine: str, where: str, words: Iterable[str], known: Iterable[str], what: str = "key") -> None:
    known = list(known)
    for word in words:
        if word not in known:
            place = f" in {where}" if where else ""
            raise UsageError(f"machine {machine} has an unknown {what} {word!r}{place}", fix=did_you_mean(word, known))


def _numbers(machine: str, where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _number(machine, f"{where}.{key}", value) for key, value in part.items()}


def _number(machine: str, where: str, value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise UsageError(f"machine {machine}: {where} is {value!r}", fix="it must be a number")
    return value
