"""Hardware of this machine, the part that this process may use, and installed software."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

import thrifty
from thrifty.core.child_python import child_environment
from thrifty.core.kept_results import keep, kept_path, read_kept
from thrifty.machine.cgroup_limits import cgroup_limits
from thrifty.machine.cpu_features import cpp_compiler, has_python_headers, usable_cores
from thrifty.machine.measured_rates import MeasuredRate, disk_rate, matmul_rate, memory_rate

EXTRAS = {
    "parquet": ("pyarrow",),
    "hub": ("datasets", "huggingface_hub"),
    "huggingface": ("transformers",),
    "gguf": ("gguf",),
    "images": ("pillow",),
    "pruning": ("scikit_learn",),
    "metrics": ("scikit_learn",),
    "duplicates": ("datasketch",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "docs": ("sphinx", "myst_parser", "furo"),
}
"""Optional extras of Thrifty, with the packages of each extra."""

INSTRUCTIONS = {
    "avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16",
    "avx512_vnni": "VNNI", "avx_vnni": "VNNI", "asimd": "NEON", "sve": "SVE", "bf16": "BF16",
}  # fmt: skip
"""Instruction sets by processor flag on Linux."""
INSTRUCTION_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that limit the instruction sets of matrix products."""


@dataclass(frozen=True)
class GpuInfo:
    name: str
    memory: int
    capability: str
    matmul: dict[str, MeasuredRate]
    """FLOP/s by dtype."""


@dataclass(frozen=True)
class MachineInfo:
    """Hardware and software of this machine. Sizes are in bytes, rates in FLOP/s and bytes/s. Unknown or unmeasured
    values are None or empty."""

    platform: str
    cpu: str
    physical_cores: int
    logical_cores: int
    """Physical and logical cores, counting only cores that this process may run on."""
    core_quota: float | None
    """CPU time limit of the control group, as a number of cores."""
    instructions: tuple[str, ...]
    torch_instructions: str
    """Widest vector instructions that torch uses."""
    gpus: tuple[GpuInfo, ...]
    memory: int
    memory_available: int
    disk_free: int
    python: str
    torch: str
    thrifty: str
    compiler: str | None
    """The C++ compiler that `torch.compile` calls for CPU code."""
    python_headers: bool
    backends: tuple[str, ...]
    missing_extras: dict[str, tuple[str, ...]]
    matmul: dict[str, MeasuredRate] = field(default_factory=dict)
    """FLOP/s of the CPU by dtype."""
    memory_rate: MeasuredRate | None = None
    disk_rate: MeasuredRate | None = None

    @property
    def cores(self) -> float:
        """Number of cores that this process can keep busy."""
        return min(self.logical_cores, self.core_quota or self.logical_cores)


@dataclass(frozen=True)
class CompileTrial:
    works: bool
    seconds: float
    message: str
    """Last line of the error; empty if there is none."""


def probe(quick: bool = False, folder: Path = Path()) -> MachineInfo:
    """Measure this machine in about 4 s, or 1 s with `quick`, which skips memory and disk rates. `folder`, such as the
    folder of runs, selects the disk for free space and write rate."""
    cores = usable_cores()
    quota, limit = cgroup_limits()
    memory = psutil.virtual_memory()
    seconds = 0.3 if quick else 1.0
    return MachineInfo(
        platform=platform.platform(terse=True),
        cpu=cpu_model(),
        physical_cores=_physical_cores(cores),
        logical_cores=len(cores),
        core_quota=quota,
        instructions=_instructions(),
        torch_instructions=torch.backends.cpu.get_cpu_capability(),
        gpus=tuple(_gpu(index, seconds) for index in range(torch.cuda.device_count())),
        memory=min(memory.total, limit or memory.total),
        memory_available=min(memory.available, limit or memory.available),
        disk_free=shutil.disk_usage(folder).free,
        python=platform.python_version(),
        torch=torch.__version__,
        thrifty=thrifty.__version__,
        compiler=cpp_compiler(),
        python_headers=has_python_headers(),
        backends=_backends(),
        missing_extras=_missing_extras(),
        matmul=_matmul_rates("cpu", seconds),
        memory_rate=None if quick else memory_rate(0.5),
        disk_rate=None if quick else disk_rate(folder),
    )


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a device, within the control group's limit."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    available, (_, limit) = psutil.virtual_memory().available, cgroup_limits()
    return float(min(available, limit or available))


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of matrix products, measured in about 0.3 s. The utilization of training steps is a
    fraction of this peak. The fastest repeat counts, also of earlier measurements on this machine, because a peak is
    the speed without other programs on the machine."""
    identity = machine_identity(torch.device(device).type) | {"dtype": str(dtype)}
    path = kept_path("peaks", identity)
    earlier, rate = read_kept(path).get("flops", 0.0), matmul_rate(device, dtype, 0.3).high
    if rate > earlier:
        keep(path, {"flops": rate, **identity})
    return max(rate, earlier)


def try_compile(timeout: float = 120.0) -> CompileTrial:
    """Compile and run a small CPU function with `torch.compile` in a new process, with an empty cache."""
    program = "import torch; f = torch.compile(lambda x: (2 * x + 1).relu().sum()); assert f(torch.ones(64)) == 192"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        # one compile thread, because a worker pool would outlive a process that is killed at the timeout
        settings = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", program],
                env=child_environment(**settings),
                timeout=timeout,
                capture_output=True,
                text=True,
            )
            lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
            works, message = done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            works, message = False, f"not done after {timeout:.0f} s"
    return CompileTrial(works, time.perf_counter() - start, "" if works else message)


def _physical_cores(logical: list[int]) -> int:
    """Return the number of physical cores that have these logical cores."""
    cores = set()
    for index in logical:
        topology = Path(f"/sys/devices/system/cpu/cpu{index}/topology")
        if not topology.is_dir():
            return min(psutil.cpu_count(logical=False) or len(logical), len(logical))
        cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
    return len(cores)


def cpu_model() -> str:
    if sys.platform == "darwin":
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        ).stdout.strip()
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _instructions() -> tuple[str, ...]:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    if not flags and platform.machine() == "arm64":
        flags = ["asimd"]  # all 64-bit ARM processors have it, though some systems list no flags
    return tuple(dict.fromkeys(INSTRUCTIONS[flag] for flag in INSTRUCTIONS if flag in flags))


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _matmul_rates(device: str, seconds: float) -> dict[str, MeasuredRate]:
    return {
        str(dtype).removeprefix("torch."): matmul_rate(device, dtype, seconds)
        for dtype in (torch.float32, torch.bfloat16)
    }


def _gpu(index: int, seconds: float) -> GpuInfo:
    properties = torch.cuda.get_device_properties(index)
    rates = _matmul_rates(f"cuda:{index}", seconds)
    return GpuInfo(properties.name, properties.total_memory, f"{properties.major}.{properties.minor}", rates)


def _backends() -> tuple[str, ...]:
    if not torch.distributed.is_available():
        return ()
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    return tuple(name for name, there in backends.items() if there)


def _missing_extras() -> dict[str, tuple[str, ...]]:
    missing = {
        extra: tuple(package for package in packages if not _is_installed(package))
        for extra, packages in EXTRAS.items()
    }
    return {extra: packages for extra, packages in missing.items() if packages}


def _is_installed(package: str) -> bool:
    """Return True if a distribution is installed. A distribution's name may differ from the import name."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def machine_identity(device: str) -> dict[str, Any]:
    """Return the facts that must be equal for a saved timing to be valid: device name, cores, threads, instructions,
    versions. The name alone does not tell apart virtual machines of one vendor."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_model()
    instructions = [*_instructions(), torch.backends.cpu.get_cpu_capability()]
    limits = {name: os.environ[name] for name in INSTRUCTION_LIMITS if name in os.environ}
    versions = {"torch": torch.__version__, "thrifty": thrifty.__version__}
    threads = {"cores": len(usable_cores()), "threads": torch.get_num_threads()}
    return {"device": name, **threads, "instructions": instructions, **limits, **versions}
