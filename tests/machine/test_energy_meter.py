"""Energy counters of Linux."""

from pathlib import Path

import pytest

from thrifty.machine.energy_meter import EnergyCounter, EnergyMeter, counters


def zone(powercap: Path, folder: str, name: str, microjoules: int) -> Path:
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(str(microjoules))
    (path / "max_energy_range_uj").write_text("1000000000")
    return path / "energy_uj"


def test_packages_are_counted_without_their_parts(tmp_path: Path) -> None:
    first, second = (zone(tmp_path, f"intel-rapl:{index}", f"package-{index}", 5_000_000) for index in (0, 1))
    part = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    packages = {name: counter for name, counter in counters(tmp_path).items() if not name.startswith("gpu")}
    assert packages.keys() == {"package-0", "package-1"}
    meter = EnergyMeter(packages)
    first.write_text("8000000")
    second.write_text("5500000")
    part.write_text("2000000")
    assert meter.read_joules() == pytest.approx(3.5)
    first.write_text("1000000")  # the counter wrapped at 1000 J
    assert meter.read_joules() == pytest.approx(3.5 + 993)


def test_package_listed_twice_is_counted_once(tmp_path: Path) -> None:
    for folder in ("intel-rapl:0", "intel-rapl-mmio:0"):
        zone(tmp_path, folder, "package-0", 5_000_000)
    assert len([name for name in counters(tmp_path) if not name.startswith("gpu")]) == 1


def test_lost_counter_makes_the_energy_unknown(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    meter = EnergyMeter({name: one for name, one in counters(tmp_path).items() if not name.startswith("gpu")})
    assert meter.read_joules() == 0
    file.unlink()
    assert meter.read_joules() is None and meter.read_joules() is None


def test_no_counter_means_unknown_energy(tmp_path: Path) -> None:
    assert EnergyMeter({}).read_joules() is None
    assert not [name for name in counters(tmp_path / "absent") if not name.startswith("gpu")]


def test_unreadable_counter_is_left_out(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
    assert not [name for name in counters(tmp_path) if not name.startswith("gpu")]


def test_counter_without_wraparound() -> None:
    values = iter([2.0, 5.0, 9.0])
    meter = EnergyMeter({"one": EnergyCounter(lambda: next(values))})
    assert (meter.read_joules(), meter.read_joules()) == (3.0, 7.0)
