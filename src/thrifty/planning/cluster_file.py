"""A cluster by name, or from your own TOML file.

    per_node = 8
    nodes = 2
    device = "h100"                  # a known device, or a table with flops, memory and bandwidth
    inside = "nvlink4"               # a known link, or a table with latency and bandwidth
    between = { latency = 5e-6, bandwidth = 5e10 }

Values are in bytes, seconds, bytes/s and FLOP/s. The table `flops` has one value per number format."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.plain_values import parse_toml
from thrifty.simulators.cluster.device_specs import DEVICES, DeviceSpec, measured
from thrifty.simulators.cluster.network_topology import CLUSTERS, LINKS, Cluster, NetworkLink, find_cluster

Thing = TypeVar("Thing", DeviceSpec, NetworkLink)
KEYS = ("per_node", "nodes", "device", "inside", "between")


def read_cluster(name: str) -> Cluster:
    """Return a cluster by name or TOML file. Raises UsageError if the name or the file is invalid."""
    path = Path(name)
    if name in CLUSTERS or path.suffix != ".toml":
        return find_cluster(name)
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"), name)
    except (OSError, ValueError) as error:
        what = f"--cluster {name!r} cannot be read: {error}"
        raise UsageError(what, fix="correct the file; or --cluster h100-box") from None
    for key in (*tables, *KEYS):
        if key not in KEYS:
            raise UsageError(f"{name!r}: a cluster has no key {key!r}", fix=did_you_mean(key, KEYS))
        if key not in tables:
            raise UsageError(f"{name!r} has no {key!r}", fix=f"add {key} = …; a cluster requires {', '.join(KEYS)}")
    counts = {key: tables[key] for key in ("per_node", "nodes")}
    for key, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"{name!r}: {key} is {count!r}, not an integer >= 1", fix=f"{key} = 1, or more")
    return Cluster(
        device=_look_up(name, "device", tables["device"], DEVICES, _device),
        inside=_look_up(name, "inside", tables["inside"], LINKS, _link),
        between=_look_up(name, "between", tables["between"], LINKS, _link),
        **counts,
    )


def _look_up(
    file: str, key: str, value: Any, known: Mapping[str, Thing], build: Callable[[str, str, Any], Thing]
) -> Thing:
    """Return the device or link of `key`. `value` is a name or a table."""
    kind = "device" if key == "device" else "link"
    if not isinstance(value, str):
        try:
            return build(file, key, value)
        except ValueError as error:
            raise UsageError(f"{file!r}: invalid {kind}: {error}", fix=f"write a name; or {_FORMS[kind]}") from None
    if value not in known:
        raise UsageError(f"{file!r}: {key} is an unknown {kind} {value!r}", fix=did_you_mean(value, known))
    return known[value]


_FORMS = {
    "device": "a table with flops = {bfloat16 = 1e15}, memory and bandwidth",
    "link": "a table with latency and bandwidth",
}


def _device(file: str, key: str, value: Any) -> DeviceSpec:
    table = _table(key, value, ("flops", "memory", "bandwidth"))
    rates = _table(f"{key}.flops", table["flops"])
    if not rates:
        raise ValueError(f"{key}.flops has no FLOP/s for any number format")
    flops = {name: _amount(f"{key}.flops.{name}", rate) for name, rate in rates.items()}
    memory, bandwidth = (_amount(f"{key}.{name}", table[name]) for name in ("memory", "bandwidth"))
    return measured("device", flops, memory, bandwidth, file)


def _link(file: str, key: str, value: Any) -> NetworkLink:
    table = _table(key, value, ("latency", "bandwidth"))
    latency = _amount(f"{key}.latency", table["latency"], or_zero=True)
    return NetworkLink("link", latency, _amount(f"{key}.bandwidth", table["bandwidth"]), file)


def _table(key: str, value: Any, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return `value` if it is a table with exactly the keys `names` (any keys by default), else raise ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}, not a table")
    for name in (*names, *value) if names else ():
        if name not in value:
            raise ValueError(f"{key}.{name} is missing")
        if name not in names:
            raise ValueError(f"{key} has no {name!r}")
    return value


def _amount(key: str, value: Any, or_zero: bool = False) -> float:
    """Return a finite number above zero (with `or_zero`: at least zero), else raise ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf and (value or or_zero)):
        raise ValueError(f"{key} is {value!r}, not a finite number {'>=' if or_zero else '>'} 0")
    return float(value)
