"""A cluster by name, or described in a TOML file of your own.

    per_node = 8
    nodes = 2
    device = "h100"                  # one that is known, or a table with flops, memory and bandwidth
    inside = "nvlink4"               # likewise a link, or a table with latency and bandwidth
    between = { latency = 5e-6, bandwidth = 5e10 }

Bytes, seconds, FLOP/s; `flops` is a table by number format.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from thrifty.cluster.devices import Device, find_device, measured
from thrifty.cluster.links import CLUSTERS, LINKS, Cluster, Link, find_cluster
from thrifty.core.errors import UsageError, did_you_mean

Thing = TypeVar("Thing", Device, Link)
KEYS = ("per_node", "nodes", "device", "inside", "between")


def read_cluster(given: str) -> Cluster:
    """Raises UsageError for an unknown name, and for a file that is no description."""
    path = Path(given)
    if given in CLUSTERS or path.suffix != ".toml":
        return find_cluster(given)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--cluster {given} cannot be read: {error}", fix="give a TOML file or a name") from None
    for key in (*tables, *KEYS):
        if key not in KEYS:
            raise UsageError(f"{given} has {key!r}, which a cluster has not", fix=did_you_mean(key, KEYS))
        if key not in tables:
            raise UsageError(f"{given} does not say {key}", fix=f"it needs {', '.join(KEYS)}")
    counts = {key: tables[key] for key in ("per_node", "nodes")}
    for key, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"{given}: {key} is {count!r}", fix="give a whole number of 1 or more")
    return Cluster(
        device=_device(given, tables["device"]),
        inside=_link(given, tables["inside"]),
        between=_link(given, tables["between"]),
        **counts,
    )


def _device(file: str, told: Any) -> Device:
    def described(table: Mapping[str, Any]) -> Device:
        flops = {name: float(rate) for name, rate in table["flops"].items()}
        return measured("device", flops, float(table["memory"]), float(table["bandwidth"]), file)

    return _found(file, "device", told, find_device, described, "flops = {bfloat16 = 1e15}, memory, bandwidth")


def _link(file: str, told: Any) -> Link:
    def named(name: str) -> Link:
        if name not in LINKS:
            raise UsageError(f"{file}: unknown link {name!r}", fix=did_you_mean(name, LINKS))
        return LINKS[name]

    def described(table: Mapping[str, Any]) -> Link:
        latency, bandwidth = float(table["latency"]), float(table["bandwidth"])
        if latency < 0 or bandwidth <= 0:
            raise ValueError("no message arrives")
        return Link("link", latency, bandwidth, file)

    return _found(file, "link", told, named, described, "latency, bandwidth")


def _found(
    file: str,
    kind: str,
    told: Any,
    named: Callable[[str], Thing],
    described: Callable[[Mapping[str, Any]], Thing],
    needs: str,
) -> Thing:
    if isinstance(told, str):
        return named(told)
    try:
        return described(told)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{file}: {told!r} is no {kind}", fix=f"give a name, or a table with {needs}") from None
