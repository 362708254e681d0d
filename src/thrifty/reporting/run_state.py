"""State of a run: the status in its summary, checked against the process that holds its lock."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrifty.core.secret_redaction import redact_text
from thrifty.machine.lock_owner import lock_owner

RUNNING, FINISHED, WAITING, KILLED = "running", "finished", "not started", "killed"
REASONS = {"interrupted": "by a signal", "stopped": "by an error"}
"""Reasons for an early end, by recorded status."""


@dataclass(frozen=True)
class RunState:
    name: str = WAITING
    """Name of the state: running, finished, interrupted, stopped, killed or not started."""
    reason: str = ""


def run_state(folder: Path, summary: Mapping[str, Any], step: float) -> RunState:
    """Return the state of a run whose last recorded step is `step`.

    A killed process leaves an old summary. A run without a lock owner was therefore killed in two cases: its summary
    is "running", or "finished" with fewer steps than recorded.
    """
    if owner := lock_owner(folder / "lock"):
        return RunState(RUNNING, f"process {owner['pid']} on {redact_text(owner['host'])}")
    status, steps = str(summary.get("status", "")), summary.get("steps")
    if not status and not step:
        return RunState()
    is_past_summary = step > (steps if isinstance(steps, int | float) else 0)
    if status in REASONS or (status == FINISHED and not is_past_summary):
        return RunState(status, REASONS.get(status, ""))
    return RunState(KILLED, "the process ended without writing a status")
