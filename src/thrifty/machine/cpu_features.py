"""Hardware and software features of this machine that techniques depend on."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

CHUNK_ELEMENTS = 256 * 1024
"""Number of elements per chunk. A chunk with its gradient and optimizer state fits a core's caches, and is large enough
to need few calls."""

GPU_CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Number of elements per chunk on a GPU. A chunk keeps all GPU cores busy, and temporary tensors stay below 100 MB."""


def usable_cores() -> list[int]:
    """Return the indices of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch uses: $CXX or the platform's default. None if it is missing."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual))


def has_python_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def can_compile() -> bool:
    """Return True if torch.compile can probably build CPU code here. Nothing is compiled."""
    return cpp_compiler() is not None and has_python_headers()


_ASSUMED: ContextVar[bool | None] = ContextVar("assumed", default=None)

WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA that exclude bfloat16 units."""


@contextmanager
def assume_bfloat16(units: bool) -> Iterator[None]:
    """Make `has_fast_bfloat16` return `units` inside the context, to plan for another device."""
    before = _ASSUMED.set(units)
    try:
        yield
    finally:
        _ASSUMED.reset(before)


def has_fast_bfloat16(device: str = "") -> bool:
    """Return True if a device of this type has hardware units for bfloat16 matrix products. By default, the device is
    the GPU, or the CPU if there is no GPU."""
    if (assumed := _ASSUMED.get()) is not None:
        return assumed
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine() in ("x86_64", "AMD64"):
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
        if limit in WITHOUT_BFLOAT16:  # the library of matrix products then does not use such units
            return False
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    information = Path("/proc/cpuinfo")
    return information.exists() and " bf16" in information.read_text()
