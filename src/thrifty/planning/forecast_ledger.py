"""Ledger of predictions: predicted and measured values of each finished run of this user, one line per run.

It widens or narrows the intervals of later plans. Lines are appended under a lock. Unreadable lines are skipped, and
failures to write one do not affect the run."""

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
"""Fewest runs from which the ledger sets an interval; with fewer it only widens the default one."""
COVERAGE = 0.9


@dataclass(frozen=True)
class LedgerEntry:
    run: str
    predicted: Mapping[str, float]
    """Known values of "counted" (bytes of tensors), "memory" (bytes as a run measures them) and "step" (seconds)."""
    measured: Mapping[str, float]
    """Values of "memory", on the first rank, and "step"."""
    machine: Mapping[str, Any]
    ranks: int = 1


def entries(device: str) -> list[LedgerEntry]:
    """Return the ledger's entries of runs on this machine's devices of a type."""
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
    """Accuracy of predictions of one quantity: measured over predicted, by run."""

    ratios: tuple[float, ...]

    @property
    def error(self) -> float | None:
        """Median relative error of the predictions, or None without runs."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios) if self.ratios else None

    def around(self, value: float, low: float, high: float) -> Estimate:
        """Return the estimate of a new prediction: by earlier runs if they are enough, else by the factors `low` and
        `high`, widened by earlier runs."""
        below, above = self._bounds() if len(self.ratios) >= ENOUGH else (low, high)
        if self.ratios and len(self.ratios) < ENOUGH:
            below, above = min(low, *self.ratios), max(high, *self.ratios)
        return Estimate(value, value * min(below, 1.0), value * max(above, 1.0))

    def _bounds(self) -> tuple[float, float]:
        """Return the bounds that cover the next ratio with COVERAGE, for exchangeable runs.

        If runs are too few for that, the bounds exceed the outermost ratios by half their distance from 1.
        """
        ordered, outside = sorted(self.ratios), (1 - COVERAGE) / 2
        place = math.floor((len(ordered) + 1) * outside)
        if place >= 1:
            return ordered[place - 1], ordered[-place]
        return ordered[0] - abs(1 - ordered[0]) / 2, ordered[-1] + abs(ordered[-1] - 1) / 2


def prediction_record(ledger: Iterable[LedgerEntry], predicted: str, measured: str) -> PredictionRecord:
    """Return the ratios of a measured quantity over a predicted one, over entries that have both."""
    ratios: Sequence[float] = [
        entry.measured[measured] / entry.predicted[predicted]
        for entry in ledger
        if entry.measured.get(measured) and entry.predicted.get(predicted)
    ]
    return PredictionRecord(tuple(ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0))
