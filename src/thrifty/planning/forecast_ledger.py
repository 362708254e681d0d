"""The ledger: what was predicted of runs and what they came to, a line for each finished run of this user.

It widens or narrows the intervals of later plans. Lines are appended whole, under a lock; a line that cannot be read is
passed over, and whatever goes wrong in keeping one is no matter of the run's.
"""

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
"""Runs from which on the ledger decides an interval; before that it only widens it."""
COVERAGE = 0.9


@dataclass(frozen=True)
class LedgerEntry:
    run: str
    predicted: Mapping[str, float]
    """What there was of "counted" (bytes of tensors), "memory" (bytes as a run measures them) and "step" (seconds)."""
    measured: Mapping[str, float]
    """Of "memory", which is that of the first rank, and "step"."""
    machine: Mapping[str, Any]
    ranks: int = 1


def entries(device: str) -> list[LedgerEntry]:
    """What is kept of runs on this machine's devices of that type."""
    here = machine_identity(device)
    ledger_entries = []
    try:
        lines = ledger_file().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return []
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            kept = json.loads(line)
            entry = LedgerEntry(kept["run"], kept["predicted"], kept["measured"], kept["machine"], kept.get("ranks", 1))
            if all(entry.machine[name] == here[name] for name in ("device", "cores")):
                ledger_entries.append(entry)
    return ledger_entries


@dataclass(frozen=True)
class PredictionRecord:
    """How well one quantity was predicted: measured over predicted, run by run."""

    ratios: tuple[float, ...]

    @property
    def error(self) -> float | None:
        """The median distance from what was predicted, as a share of it."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios) if self.ratios else None

    def around(self, value: float, low: float, high: float) -> Estimate:
        """An interval for a new prediction: from what was measured of earlier ones, if they are enough; else the given
        factors, widened by them."""
        below, above = self._bounds() if len(self.ratios) >= ENOUGH else (low, high)
        if self.ratios and len(self.ratios) < ENOUGH:
            below, above = min(low, *self.ratios), max(high, *self.ratios)
        return Estimate(value, value * min(below, 1.0), value * max(above, 1.0))

    def _bounds(self) -> tuple[float, float]:
        """Between which the next ratio lies with the coverage promised, if runs are alike; where they are too few to
        tell, as much beyond the outermost as that is from 1."""
        ordered, outside = sorted(self.ratios), (1 - COVERAGE) / 2
        place = math.floor((len(ordered) + 1) * outside)
        if place >= 1:
            return ordered[place - 1], ordered[-place]
        return ordered[0] - abs(1 - ordered[0]) / 2, ordered[-1] + abs(ordered[-1] - 1) / 2


def prediction_record(kept: Iterable[LedgerEntry], predicted: str, measured: str) -> PredictionRecord:
    ratios: Sequence[float] = [
        entry.measured[measured] / entry.predicted[predicted]
        for entry in kept
        if entry.measured.get(measured) and entry.predicted.get(predicted)
    ]
    return PredictionRecord(tuple(ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0))
