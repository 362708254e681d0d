"""Owner of a lock file: the process that the file names, if this process exists."""

import json
import socket
from pathlib import Path
from typing import Any

from thrifty.machine.process_start import is_running


def lock_owner(file: Path) -> dict[str, Any]:
    """Return the owner of a lock as {"pid", "host", "started"}, or {} if the lock has no owner. An owner on another
    machine counts as alive. The lock itself is not acquired, so another process can acquire it at the same time."""
    if not file.is_file():  # opening a pipe would block until another process writes into it
        return {}
    try:
        with file.open("rb") as opened:
            owner = read_owner(opened.read(4096))
    except OSError:
        return {}
    return owner if owner and (owner["host"] != socket.gethostname() or is_alive(owner)) else {}


def read_owner(content: bytes) -> dict[str, Any]:
    """Return the owner that a lock file's content names; {} if it is empty or invalid."""
    try:
        owner = json.loads(content)
        return {"pid": int(owner["pid"]), "host": str(owner["host"]), "started": float(owner["started"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


def is_alive(owner: dict[str, Any]) -> bool:
    """Return True if the owner's process exists. A later process with the same pid does not count."""
    return is_running(owner["pid"], owner["started"])
