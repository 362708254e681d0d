"""A cluster by name, or described in a TOML file of your own.

    per_node = 8
    nodes = 2
    device = "h100"                  # one that is known, or a table with flops, memory and bandwidth
    inside = "nvlink4"               # likewise a link, or a table with latency and bandwidth
    between = { latency = 5e-6, bandwidth = 5e10 }

Bytes, seconds, FLOP/s; `flops` is a table by number format.
"""

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
    """Raises UsageError for an unknown name, and for a file that is no description."""
    path = Path(name)
    if name in CLUSTERS or path.suffix != ".toml":
        return find_cluster(name)
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"), name)
    except (OSError, ValueError) as error:
        raise UsageError(f"--cluster {name} cannot be read: {error}", fix="give a TOML file or a name") from None
    for key in (*tables, *KEYS):
        if key not in KEYS:
            raise UsageError(f"{name} has {key!r}, which a cluster has not", fix=did_you_mean(key, KEYS))
        if key not in tables:
            raise UsageError(f"{name} does not say {key}", fix=f"it needs {', '.join(KEYS)}")
    counts = {key: tables[key] for key in ("per_node", "nodes")}
    for key, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"{name}: {key} is {count!r}", fix="give a whole number of 1 or more")
    return Cluster(
        device=_found(name, "device", tables["device"], DEVICES, _device),
        inside=_found(name, "inside", tables["inside"], LINKS, _link),
        between=_found(name, "between", tables["between"], LINKS, _link),
        **counts,
    )


def _found(
    file: str, key: str, told: Any, known: Mapping[str, Thing], described: Callable[[str, str, Any], Thing]
) -> Thing:
    """What a key of the file tells of, by name or as a table."""
    kind = "device" if key == "device" else "link"
    if not isinstance(told, str):
        try:
            return described(file, key, told)
        except ValueError as error:
            raise UsageError(f"{file}: {key} is no {kind}: {error}", fix=f"give a name, or {_NEEDS[kind]}") from None
    if told not in known:
        raise UsageError(f"{file}: {key} is an unknown {kind} {told!r}", fix=did_you_mean(told, known))
    return known[told]


_NEEDS = {
    "device": "a table with flops = {bfloat16 = 1e15}, memory and bandwidth",
    "link": "a table with latency and bandwidth",
}


def _device(file: str, key: str, told: Any) -> DeviceSpec:
    table = _table(key, told, ("flops", "memory", "bandwidth"))
    rates = _table(f"{key}.flops", table["flops"])
    if not rates:
        raise ValueError(f"{key}.flops has no rate of any number format")
    flops = {name: _amount(f"{key}.flops.{name}", rate) for name, rate in rates.items()}
    memory, bandwidth = (_amount(f"{key}.{name}", table[name]) for name in ("memory", "bandwidth"))
    return measured("device", flops, memory, bandwidth, file)


def _link(file: str, key: str, told: Any) -> NetworkLink:
    table = _table(key, told, ("latency", "bandwidth"))
    latency = _amount(f"{key}.latency", table["latency"], or_zero=True)
    return NetworkLink("link", latency, _amount(f"{key}.bandwidth", table["bandwidth"]), file)


def _table(key: str, told: Any, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Raises ValueError where it is no table, or one without or beside these names, if they are given."""
    if not isinstance(told, Mapping):
        raise ValueError(f"{key} is {told!r}, and no table")
    for name in (*names, *told) if names else ():
        if name not in told:
            raise ValueError(f"{key}.{name} is missing")
        if name not in names:
            raise ValueError(f"{key} has no {name!r}")
    return told


def _amount(key: str, value: Any, or_zero: bool = False) -> float:
    """Raises ValueError for what is no finite number above zero, or of zero where that may be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf and (value or or_zero)):
        raise ValueError(f"{key} is {value!r}, and no finite number {'of zero or ' if or_zero else ''}above zero")
    return float(value)
