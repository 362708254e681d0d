"""The C++ compiler that torch.compile uses for code on CPUs."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def cpp_compiler() -> str | None:
    """The path of the compiler, by torch's rule: $CXX, or the platform's usual one; None where it is not installed."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual))


def has_python_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def can_compile() -> bool:
    """Whether torch.compile can build CPU code here, as far as can be seen without trying."""
    return cpp_compiler() is not None and has_python_headers()
