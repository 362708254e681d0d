"""Owner of a lock file: the process that holds it, as the file says, and only while that process exists."""

import json
import socket
from pathlib import Path
from typing import Any

from thrifty.machine.process_start import is_running


def lock_owner(file: Path) -> dict[str, Any]:
    """Return who holds a lock: {"pid", "host", "started"}, or {} if nobody does.

    An owner on another machine is believed. The lock itself is not touched, so that a start at this moment is not
    refused.
    """
    if not file.is_file():  # to open a pipe would be to wait for somebody who writes into it
        return {}
    try:
        with file.open("rb") as opened:
            owner = read_owner(opened.read(4096))
    except OSError:
        return {}
    return owner if owner and (owner["host"] != socket.gethostname() or is_alive(owner)) else {}


def read_owner(content: bytes) -> dict[str, Any]:
    """Return who wrote the file last and did not empty it; {} if nobody, or if it is not readable as that."""
    try:
        owner = json.loads(content)
        return {"pid": int(owner["pid"]), "host": str(owner["host"]), "started": float(owner["started"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


def is_alive(owner: dict[str, Any]) -> bool:
    """Return True if this very process exists, not a later one with the same number."""
    return is_running(owner["pid"], owner["started"])
