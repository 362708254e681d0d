"""Environment of a run: hardware, versions, and the command without secrets.

Only an allow-list of facts is recorded. No environment variable is ever read.
"""

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from thrifty.core.secret_redaction import redact_command
from thrifty.machine.cpu_features import usable_cores


def environment(device: str) -> dict[str, Any]:
    """Return the content of `environment.json`; memory in bytes, `started` in UTC."""
    return {
        "thrifty": _own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(usable_cores()),
        "memory": psutil.virtual_memory().total,
        "device": device,
        **(
            {"gpu": torch.cuda.get_device_name(device)}
            if device.startswith("cuda") and torch.cuda.is_available()
            else {}
        ),
        "command": redact_command([*_program(), *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _program() -> list[str]:
    path = Path(sys.argv[0])
    return ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]


def _own_version() -> str:
    try:
        return version("thrifty")
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
