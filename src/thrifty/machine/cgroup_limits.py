"""CPU and memory limits of Linux control groups, such as those of containers and batch systems."""

from pathlib import Path


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None]:
    """Return this process's limits of CPU cores and memory bytes, for cgroup version 1 or 2. None means no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None, None
    cores: list[float] = []
    memory: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        here = root.joinpath(controllers, path.lstrip("/"))
        top = root / controllers
        for group in (here, *here.parents):
            if not group.is_relative_to(top):
                break
            cores += _core_quota(group)
            memory += _integers(group / "memory.max") + _integers(group / "memory.limit_in_bytes")
    unlimited = 1 << 60  # version 1 writes a value near 2**63 for "no limit"
    return min(cores, default=None), min((size for size in memory if size < unlimited), default=None)


def _core_quota(group: Path) -> list[float]:
    both = _integers(group / "cpu.max") or _integers(group / "cpu.cfs_quota_us") + _integers(
        group / "cpu.cfs_period_us"
    )
    return [both[0] / both[1]] if len(both) == 2 and both[0] > 0 else []


def _integers(file: Path) -> list[int]:
    """Return the integers in a file; [] if the file is missing or contains "max"."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
