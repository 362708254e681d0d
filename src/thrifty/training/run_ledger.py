"""The ledger of this machine: predicted and measured memory and step time of finished runs."""

import hashlib
import json
import os
import statistics
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thrifty.core.cache_dir import cache_folder
from thrifty.core.file_locks import lock_file
from thrifty.machine.cpu_features import usable_cores
from thrifty.machine.machine_info import machine_identity

FREE = ("name", "about", "budget", "evaluation", "checkpoints")
"""Recipe sections that affect neither the memory nor the time of a step."""

PATIENCE = 5.0
"""Maximum seconds that a run waits for the lock of the ledger."""

CROWDED = 0.5
"""Tolerated excess of the load average over the number of cores, as a fraction. The load average also counts threads
that wait briefly."""

TAIL = 1 << 20
"""Number of bytes read at the end of a run's records, enough for thousands of steps."""


def ledger_file() -> Path:
    return cache_folder() / "plans" / "ledger.jsonl"


def definition(recipe: Mapping[str, Any]) -> str:
    """Return the hash that identifies a forecast: a hash of the recipe without the sections in FREE."""
    relevant = {name: section for name, section in recipe.items() if name not in FREE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:24]


def forecast_file(recipe: Mapping[str, Any]) -> Path:
    return cache_folder() / "plans" / "forecasts" / f"{definition(recipe)}.json"


def record_forecast(recipe: Mapping[str, Any], predicted: Mapping[str, float]) -> None:
    """Store the prediction for a recipe until a run of the recipe has finished."""
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = forecast_file(recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(predicted)), encoding="utf-8")


def record_run(folder: Path, summary: Mapping[str, Any]) -> None:
    """Append a finished run to the ledger. Do nothing for a run that ended early."""
    if summary.get("status") != "finished":
        return
    with suppress(Exception):  # an error here must not fail a run that is finished
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
        predicted = {"counted": float(summary["predicted_memory"])}
        with suppress(OSError, ValueError):
            predicted |= json.loads(forecast_file(recipe).read_text(encoding="utf-8"))
        measured = {"memory": float(summary["peak_memory"])}
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        kind = str(environment["device"]).partition(":")[0]
        seconds = _step_seconds(folder / "records.jsonl")
        if seconds and not (kind == "cpu" and _is_crowded()):
            measured["step"] = statistics.median(seconds)
        _append({"run": folder.name, "predicted": predicted, "measured": measured,
                 "machine": machine_identity(kind), "ranks": environment.get("ranks", 1),
                 "finished": datetime.now(UTC).isoformat(timespec="seconds")})  # fmt: skip


def _is_crowded() -> bool:
    """Return True if other processes used this machine's cores during the last minute. Measured step times are then too
    long."""
    return os.getloadavg()[0] > len(usable_cores()) * (1 + CROWDED)


def _step_seconds(records: Path) -> list[float]:
    """Return the durations in seconds of a run's last steps. The first two steps are excluded, because they compile and
    warm up."""
    with records.open("rb") as file:
        file.seek(max(records.stat().st_size - TAIL, 0))
        lines = file.read().splitlines()
    seconds = []
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            record = json.loads(line)
            if record["kind"] == "step" and record["step"] > 2:
                seconds.append(float(record["step_seconds"]))
    return seconds


def _append(entry: Mapping[str, Any]) -> None:
    path = ledger_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(entry, sort_keys=True) + "\n"
    handle = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        _lock(handle)
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    """Lock the file. Raise BlockingIOError after PATIENCE seconds, because a stopped process may hold the lock."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            lock_file(handle, wait=False)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.01)
