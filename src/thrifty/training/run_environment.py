"""What a run ran on: an allow-list of facts about the machine and the versions, and the command without its secrets.

No environment variable is ever read.
"""

import platform
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from thrifty.machine.cpu_features import usable_cores

REDACTED = "[redacted]"
_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|authorization|bearer|cookie"
    r"|(?:api|access|private|secret|auth)[-_.]?key)(?:$|[^a-z])",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf|ghp|gho|ghu|ghs|ghr|npm|glpat|github_pat|nvapi|gsk|r8|sk|pk|rk)[_-][A-Za-z0-9_-]{8,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[A-Za-z0-9_-]{20,}|\bxox[a-z]-[A-Za-z0-9-]{8,}|\bpypi-[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]{8,}|(?<=://)[^\s/@]+(?=@)"
)


def environment(device: str) -> dict[str, Any]:
    """The content of `environment.json`; memory in bytes, `started` in UTC."""
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
        "command": redacted([*_program(), *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def redacted(command: list[str]) -> list[str]:
    """The words of a command line, with what is or looks like a secret blanked out.

    `--api-key VALUE`, `--set x.token=VALUE`, a password in an address, and keys of known shapes.
    """
    shown: list[str] = []
    secret_follows = False
    for word in command:
        name, sign, _ = word.partition("=")
        if secret_follows:
            shown.append(REDACTED)
        elif sign and _SECRET_NAME.search(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(_SECRET_VALUE.sub(REDACTED, word))
        secret_follows = word.startswith("-") and not sign and bool(_SECRET_NAME.search(name))
    return shown


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
