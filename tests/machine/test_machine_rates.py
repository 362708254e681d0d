"""Results of the machine probe agree with independent sources."""

import json
import os
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import torch

import thrifty
from thrifty.machine import machine_info, measured_rates
from thrifty.machine.cgroup_limits import cgroup_limits
from thrifty.machine.machine_info import EXTRAS, MachineInfo, machine_identity, peak_flops, probe, try_compile
from thrifty.machine.measured_rates import MeasuredRate, disk_rate, matmul_rate, memory_rate


@pytest.fixture(scope="module")
def machine() -> MachineInfo:
    return probe(quick=True)


def test_probe_agrees_with_other_sources(machine):
    assert machine.torch == torch.__version__ and machine.thrifty == thrifty.__version__
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert 0 < machine.memory_available <= machine.memory <= psutil.virtual_memory().total
    assert 1 <= machine.physical_cores <= machine.logical_cores <= os.cpu_count()
    assert len(machine.gpus) == torch.cuda.device_count()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_only_usable_cores_count():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        machine = probe(quick=True)
    finally:
        os.sched_setaffinity(0, allowed)
    assert machine.physical_cores == machine.logical_cores == machine.cores == 1


def test_quick_probe_skips_slow_measurements(machine):
    assert machine.memory_rate is None and machine.disk_rate is None
    assert set(machine.matmul) == {"float32", "bfloat16"}


def test_rates_have_a_median_within_their_spread(tmp_path):
    for rate in (matmul_rate("cpu", torch.float32, 0.1), memory_rate(0.1), disk_rate(tmp_path, size=1 << 20)):
        assert rate.repeats >= 3 and 0 < rate.low <= rate.median <= rate.high
    assert not list(tmp_path.iterdir())


def test_disk_without_space_or_permission_is_not_written(tmp_path):
    assert disk_rate(tmp_path, size=1 << 60) is None
    assert disk_rate(tmp_path / "absent") is None


def test_peak_flops_are_near_those_of_a_plain_product():
    import time

    a = torch.randn(1024, 1024)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    assert 0.2 < peak_flops("cpu", torch.float32) / (2 * 1024**3 / min(times)) < 5


def test_the_fastest_measured_peak_of_a_machine_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    rates = iter([3e11, 2e11, 4e11, 1e11, 1e11])
    monkeypatch.setattr(machine_info, "matmul_rate", lambda *_: MeasuredRate(0.0, 0.0, next(rates), 3))
    peaks = [peak_flops("cpu", torch.float32) for _ in range(3)]
    assert peaks == [3e11, 3e11, 4e11]
    assert peak_flops("cpu", torch.bfloat16) == 1e11
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert peak_flops("cpu", torch.float32) == 1e11


def test_timings_hold_for_one_set_of_instructions_only(monkeypatch):
    known = [machine_identity("cpu")]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    known.append(machine_identity("cpu"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    known.append(machine_identity("cpu"))
    monkeypatch.setattr(machine_info, "_instructions", lambda: ("AVX2",))
    known.append(machine_identity("cpu"))
    assert all(one != other for i, one in enumerate(known) for other in known[:i])
    assert json.loads(json.dumps(known)) == known


def test_extras_equal_those_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {
        extra: tuple(requirement.split(">=")[0].replace("-", "_") for requirement in requirements)
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in ("test", "triton", "examples", "demo")  # not required for training
    }
    assert {extra: tuple(modules) for extra, modules in EXTRAS.items()} == declared


def write_groups(root: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "membership").write_text(membership)
    return root / "fs", root / "membership"


def test_tightest_limit_of_nested_cgroups_counts(tmp_path):
    files = {
        "job/task/cpu.max": "max 100000\n",
        "job/cpu.max": "150000 100000\n",
        "job/task/memory.max": "8000000000\n",
        "job/memory.max": "max\n",
    }
    assert cgroup_limits(*write_groups(tmp_path, files, "0::/job/task\n")) == (1.5, 8_000_000_000)


def test_cgroups_of_version_1_are_read(tmp_path):
    files = {
        "cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
        "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    groups = write_groups(tmp_path, files, "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n")
    assert cgroup_limits(*groups) == (2.0, None)


def test_no_cgroups_means_no_limit(tmp_path):
    assert cgroup_limits(tmp_path, tmp_path / "absent") == (None, None)


@pytest.mark.slow
def test_compile_trial_compiles(monkeypatch):
    assert try_compile().works
    monkeypatch.setenv("CXX", "/no/such/compiler")
    failed = try_compile()
    assert not failed.works and failed.message


def test_compile_trial_times_out():
    trial = try_compile(timeout=0.2)
    assert not trial.works and "0 s" in trial.message


def test_too_slow_product_sizes_are_skipped(monkeypatch):
    tried = []

    def repeated(function, work, seconds, device):
        tried.append(work)
        return MeasuredRate(1e9, 1e9, 1e9, 3)

    monkeypatch.setattr(measured_rates, "_repeated", repeated)
    repeats = (1 + measured_rates.LEAST_REPEATS) * 2 * 2048**3 / 1e9
    matmul_rate("cpu", torch.float32, seconds=0.9 * repeats)
    assert tried == [2 * 512**3, 2 * 1024**3]
    matmul_rate("cpu", torch.float32, seconds=1.1 * repeats)
    assert tried[2:] == [2 * 512**3, 2 * 1024**3, 2 * 2048**3]
