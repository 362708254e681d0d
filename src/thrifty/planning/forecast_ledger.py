"""Ledger of predictions: predicted and measured values of each finished run of this user, one line per run.

The ledger widens or narrows the intervals of later plans. Lines are appended under a lock. Unreadable lines are
skipped. If a line cannot be written, the run continues."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from thrifty.machine.machine_info import machine_identity
from thrifty.planning.cost_estimates import Estimate
from thrifty.training.run_ledger import ledger_file

ENOUGH = 5
"""Minimum number of runs for an interval from the ledger. Fewer runs only widen the default interval."""
COVERAGE = 0.9


@dataclass(frozen=True)
class LedgerEntry:
    run: str
    predicted: Mapping[str, float]
    """Known predictions: "counted" (bytes of tensors), "memory" (bytes that a run measures), "step" (seconds)."""
    measured: Mapping[str, float]
    """Measured "memory" (bytes, on the first rank) and "step" (seconds)."""
    machine: Mapping[str, Any]
    ranks: int = 1


def entries(device: str) -> list[LedgerEntry]:
    """Return the ledger's entries of runs on this machine and this type of device."""
    machine = machine_identity(device)
    ledger_entries = []
    try:
        lines = ledger_file().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return []
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            row = json.loads(line)
            entry = LedgerEntry(row["run"], row["predicted"], row["measured"], row["machine"], row.get("ranks", 1))
            if all(entry.machine[name] == machine[name] for name in ("device", "cores")):
                ledger_entries.append(entry)
    return ledger_entries


@dataclass(frozen=True)
class PredictionRecord:
    """Accuracy of predictions of one quantity: the ratio measured / predicted of each run."""

    ratios: tuple[float, ...]

    @property
    def error(self) -> float | None:
        """Median relative error of predictions; None if there are no runs."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios) if self.ratios else None

    def around(self, value: float, low: float, high: float) -> Estimate:
        """Return a new prediction with its interval.

        With at least `ENOUGH` runs, the interval is computed from the ratios of the runs. With fewer runs, it is `low`
        to `high`, widened to contain these ratios."""
        below, above = self._bounds() if len(self.ratios) >= ENOUGH else (low, high)
        if self.ratios and len(self.ratios) < ENOUGH:
            below, above = min(low, *self.ratios), max(high, *self.ratios)
        return Estimate(value, value * min(below, 1.0), value * max(above, 1.0))

    def _bounds(self) -> tuple[float, float]:
        """Return bounds that contain the next ratio with probability `COVERAGE`, if runs are exchangeable.

        For too few runs, the bounds extend beyond the extreme ratios by half the distance of these ratios from 1.
        """
        ordered, outside = sorted(self.ratios), (1 - COVERAGE) / 2
        place = math.floor((len(ordered) + 1) * outside)
        if place >= 1:
            return ordered[place - 1], ordered[-place]
        return ordered[0] - abs(1 - ordered[0]) / 2, ordered[-1] + abs(ordered[-1] - 1) / 2


def prediction_record(ledger: Iterable[LedgerEntry], predicted: str, measured: str) -> PredictionRecord:
    """Return the ratios measured / predicted of all entries that have both quantities."""
    ratios: Sequence[float] = [
        entry.measured[measured] / entry.predicted[predicted]
        for entry in ledger
        if entry.measured.get(measured) and entry.predicted.get(predicted)
    ]
    return PredictionRecord(tuple(ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0))
