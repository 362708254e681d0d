"""Accelerator machines: stations, memories, clock, and published area and power of each module.

A machine is data (`machines/*.toml`). Its design (`designs/`) defines the meaning of its stations (pipeline stages).
Grades of published figures, from best to worst: P (read in the paper), R (read in released source or data), X (computed
here), S (from notes on the paper), M (recalled and not checked). Figures of grade M are never targets of a comparison.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.setting_bounds import Rate, SettingBound, check_bounds

Setting = float | str | bool
Grade = Literal["P", "R", "X", "S", "M"]
Size = Annotated[int, SettingBound(least=1, most=2**31 - 1)]
Limit = Annotated[int, SettingBound(least=0, most=2**31 - 1)]
"""Upper limit; 0 for no limit."""
FromOne = Annotated[float, SettingBound(least=1)]


@dataclass(frozen=True)
class PipelineStation:
    """A pipeline stage that processes one work item at a time."""

    name: str
    width: Size = 1
    """Operations per cycle. The design defines the operation."""
    buffer: Limit = 1
    """Capacity of the buffer before the next station, in items; 0 for no limit."""

    def __post_init__(self) -> None:
        check_bounds(self, f"stations.{self.name}")


@dataclass(frozen=True)
class AcceleratorMemory:
    """A memory of `banks` banks that is connected by a crossbar with `ports` ports."""

    name: str
    bytes: FromOne = math.inf
    banks: Size = 1
    ports: Limit = 0
    """Number of ports. Each port sends one request per cycle. 0 for no limit."""
    bandwidth: FromOne = math.inf
    """Total bandwidth of all banks in bytes/s."""
    latency: Rate = 0.0
    """Seconds from the start of a request at its bank to its reply, in addition to the transfer time."""
    outstanding: Limit = 0
    """Maximum number of requests in flight; 0 for no limit."""
    burst: Size = 64
    """Bytes per request."""
    shared: bool = False
    """True if all copies share one memory. `bandwidth` is then one copy's part, which other copies use while the copy
    is idle.
    """

    def __post_init__(self) -> None:
        check_bounds(self, f"memories.{self.name}")


@dataclass(frozen=True)
class ChipModule:
    """Area and power of one part of the chip."""

    name: str
    active: str
    """Name of the station or activity of the design during which the module is active."""
    area: Rate = 0.0
    """Area in mm²."""
    dynamic: Rate = 0.0
    """Dynamic power in W, while active at `clock`."""
    static: Rate = 0.0
    """Static power in W, drawn at all times."""
    clock: FromOne = 1.0
    """Clock in Hz for which the power was published."""
    source: str = ""
    grade: Grade = "M"

    def __post_init__(self) -> None:
        check_bounds(self, f"modules.{self.name}")


@dataclass(frozen=True)
class AcceleratorSpec:
    """An accelerator with all parameters. The `copies` of the accelerator divide the work; each copy has its own
    memories.
    """

    name: str
    design: str
    clock: FromOne
    """Clock in Hz."""
    source: str
    grade: Grade
    about: str = ""
    node: Rate = 0.0
    """Process node in nm; 0 if not applicable."""
    copies: Size = 1
    stations: Mapping[str, PipelineStation] = field(default_factory=dict)
    memories: Mapping[str, AcceleratorMemory] = field(default_factory=dict)
    modules: Mapping[str, ChipModule] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    """Names of the settings that are hardware sizes. Area and power are published for one value of each setting."""
    notes: tuple[str, ...] = ()
    """Conditions and assumptions of area and power."""

    def __post_init__(self) -> None:
        check_bounds(self, f"machine {self.name}")
        for setting, value in self.settings.items():
            if not isinstance(value, (bool, str)) and not 0 < value < math.inf:
                raise UsageError(f"machine {self.name!r}: {setting} is {value:g}", fix="set a finite value above zero")

    @property
    def area(self) -> float | None:
        """Area of one copy in mm²; None if unknown."""
        return sum(module.area for module in self.modules.values()) or None

    @property
    def buffers(self) -> list[int]:
        """Capacity of the buffers between stations, in items; 0 for no limit."""
        return [station.buffer for station in self.stations.values()][:-1]

    def number(self, setting: str) -> float:
        """Return a numeric setting."""
        value = self.settings[setting]
        assert not isinstance(value, str), setting
        return float(value)

    def size(self, memory: str) -> int:
        """Return the size of a memory in bytes. Raises UsageError if the machine lacks the memory or its size."""
        if memory not in self.memories:
            key = memory if memory.isidentifier() else f'"{memory}"'
            raise UsageError(
                f"machine {self.name!r} lacks memory {memory!r}, which {self.design} requires",
                fix=f"add [memories.{key}] with bytes = … to its file",
            )
        if math.isinf(self.memories[memory].bytes):
            raise UsageError(
                f"machine {self.name!r} has no memories.{memory}.bytes", fix="add bytes = … to that table of its file"
            )
        return int(self.memories[memory].bytes)

    def replaced(self, path: str, value: object) -> "AcceleratorSpec":
        """Return the machine with one value changed. Raises UsageError for an unknown path or a value of the wrong
        type.

        `path` is, for example, `clock`, `stations.hash.width`, `memories.dram.bandwidth`, or the name of a setting.
        Area and power of modules scale with the width of their station; memories do not scale. If any other hardware
        size changes, area and power become unknown.
        """
        changed, before = self._with_value(path, value), self._value(path)
        if not self.modules or changed._value(path) == before:
            return changed
        first, *rest = path.split(".")
        if first == "stations" and rest[1] == "width":
            station = changed.stations[rest[0]]
            note = f"{self.name}: area and power of modules of {rest[0]} scale with its width (assumption)"
            modules = self.scaled_modules({rest[0]: station.width / before})
            return replace(changed, modules=modules, notes=(*self.notes, note))
        is_size = path in (*self.sizes, "node") or first == "stations" or (first == "memories" and rest[0] != "dram")
        return changed.without_area(f"{path} = {before}") if is_size else changed

    def without_area(self, published: str) -> "AcceleratorSpec":
        """Return the machine without area and power, because both are published only for the size `published`."""
        note = f"area and power of {self.name} are published for {published}: unknown for this size"
        return replace(self, modules={}, notes=(*self.notes, note))

    def values(self) -> dict[str, Setting]:
        """Return all changeable values by path. Values of modules cannot change."""
        values = {**self.settings, "clock": self.clock, "node": self.node, "copies": self.copies}
        for kind in ("stations", "memories"):
            for name, part in getattr(self, kind).items():
                values |= {f"{kind}.{name}.{key}": getattr(part, key) for key in sorted(_keys(part) - {"name"})}
        return values

    def _value(self, path: str) -> Any:
        return self.values().get(path)

    def _with_value(self, path: str, value: object) -> "AcceleratorSpec":
        first, *rest = path.split(".")
        if not rest and first in self.settings:
            changed = {**self.settings, first: _like(path, value, self.settings[first])}
            return replace(self, settings=changed)
        if not rest and first in ("clock", "node", "copies"):
            return replace(self, **{first: _like(path, value, getattr(self, first))})
        if first in ("stations", "memories", "modules") and len(rest) == 2:
            parts, (name, key) = getattr(self, first), rest
            if name not in parts:
                raise UsageError(
                    f"machine {self.name!r} has no '{path.rpartition('.')[0]}'", fix=did_you_mean(name, parts)
                )
            if key not in _keys(parts[name]) or key == "name":
                raise UsageError(f"{path!r}: no key {key!r}", fix=did_you_mean(key, _keys(parts[name]) - {"name"}))
            part = replace(parts[name], **{key: _like(path, value, getattr(parts[name], key))})
            return replace(self, **{first: {**parts, name: part}})
        known = [*self.settings, "clock", "copies"]
        known += [f"stations.{name}.width" for name in self.stations]
        known += [f"memories.{name}.bandwidth" for name in self.memories]
        raise UsageError(f"machine {self.name!r} has no value {path!r}", fix=did_you_mean(path, known))

    def with_bandwidth(self, bandwidth: float) -> "AcceleratorSpec":
        """Return the machine with an outer memory "dram". All copies share `bandwidth`, in bytes/s."""
        dram = replace(
            self.memories.get("dram", AcceleratorMemory("dram")), bandwidth=bandwidth / self.copies, shared=True
        )
        return replace(self, memories={**self.memories, "dram": dram})

    def scaled_stations(self, by: int, over: int) -> dict[str, PipelineStation]:
        """Return the stations with widths scaled by `by` / `over`, rounded down to integers of at least 1."""
        return {
            name: replace(station, width=max(1, station.width * by // over)) for name, station in self.stations.items()
        }

    def scaled_modules(self, factors: Mapping[str, float]) -> Mapping[str, ChipModule]:
        """Return the modules with area and power multiplied by the factor of their station or activity.

        Memories are not scaled. Proportional scaling is an assumption.
        """
        return {
            name: replace(
                module,
                area=module.area * (factor := 1.0 if "memory" in name else factors.get(module.active, 1.0)),
                dynamic=module.dynamic * factor,
                static=module.static * factor,
            )
            for name, module in self.modules.items()
        }


def _keys(part: object) -> set[str]:
    return {known.name for known in fields(part)}  # pyrefly: ignore


def _like(path: str, value: object, present: Setting) -> Any:
    """Convert `value` to the type of `present`. Raises UsageError if the conversion fails."""
    if isinstance(present, str):
        return str(value)
    text = str(value).lower()
    if isinstance(present, bool) and text in ("true", "false", "0", "1", "on", "off"):
        return text in ("true", "1", "on")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    whole = isinstance(present, int) and not isinstance(present, bool)
    if math.isnan(number) or isinstance(present, bool) or (whole and not number.is_integer()):
        kind = "true or false" if isinstance(present, bool) else "a whole number" if whole else "a number"
        raise UsageError(f"{path} = {value!r} is not {kind}", fix=f"for example {path}={present}")
    return int(number) if whole else number
