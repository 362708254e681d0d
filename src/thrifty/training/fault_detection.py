"""Detection of dead, silent and hanging ranks from the heartbeats in the shared store."""

import json
from typing import Any

import torch.distributed as dist

from thrifty.training.failure_verdict import FailureVerdict, restart_advice
from thrifty.training.progress_watchdog import ProgressWatchdog, StallTimer
from thrifty.training.rendezvous import ProcessIdentity

ASIDE = 3.0
"""Seconds without a heartbeat after which a rank counts as lost, once any rank is known to be unreachable."""


class FaultDetector:
    """Failure checks of all ranks. `store` contains the heartbeats; `near` are the ranks on this machine."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: int, near: list[int], silence: float, pulse: ProgressWatchdog
    ):
        self.store, self.rank, self.ranks, self.near = store, rank, ranks, near
        self.limit, self.pulse = silence, pulse
        self._after, self._each = StallTimer(), [StallTimer() for _ in range(ranks)]

    def find_failure(self, tick: float, lost: bool) -> FailureVerdict | None:
        """Return the verdict on a failure, or None. `lost` is True if some rank is known to be unreachable."""
        verdict = self._gone() or self._silent(tick) or self._hanging()
        return verdict or (self._unreached(tick) if lost else None)

    def beat(self, rank: int) -> dict[str, Any]:
        """Return the last heartbeat of a rank; {} before the first heartbeat."""
        key = f"beat/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else {}

    def process(self, rank: int) -> ProcessIdentity:
        return ProcessIdentity.from_json(self.store.get(f"here/{rank}"))

    def _gone(self) -> FailureVerdict | None:
        for rank in self.near:
            if self.store.check([f"here/{rank}"]) and (process := self.process(rank)).is_near and process.is_gone:
                beat = {"doing": "the start", "left": False} | self.beat(rank)
                if beat["left"]:
                    continue
                return self._against(rank, f"was killed or crashed, last seen in {beat['doing']}")
        return None

    def _silent(self, tick: float) -> FailureVerdict | None:
        """Return the verdict if the next rank is silent. Each rank checks only one other rank, so the store's load per
        rank is constant."""
        rank = (self.rank + 1) % self.ranks
        beat = self.beat(rank)
        seconds = self._after.update(beat, tick)
        return self._unheard(rank, beat, seconds) if seconds > self.limit else None

    def _unreached(self, tick: float) -> FailureVerdict | None:
        for rank, silence in enumerate(self._each):
            beat = self.beat(rank)
            seconds = silence.update(beat, tick)
            if seconds > ASIDE and (verdict := self._unheard(rank, beat, seconds)):
                return verdict
        return None

    def _unheard(self, rank: int, beat: dict[str, Any], seconds: float) -> FailureVerdict | None:
        if rank == self.rank or not beat or beat["left"]:
            return None
        stopped = "its process is stopped"
        if not self.process(rank).is_near:
            stopped += " or its host is unreachable"
        what = f"has sent no heartbeat for {seconds:.0f} s, last seen in {beat['doing']}: {stopped}"
        return self._against(rank, what, kill=True)

    def _hanging(self) -> FailureVerdict | None:
        if self.pulse.hangs:
            return self._hang_verdict(self.rank, self.beat(self.rank), self.pulse.busy)
        if not self.pulse.is_stuck:
            return None
        beats = [self.beat(rank) for rank in range(self.ranks)]
        for rank, beat in enumerate(beats):
            if beat and not beat["waits"] and not beat["left"]:
                return None if beat["starting"] else self._hang_verdict(rank, beat, self.pulse.still)
        what = f"has waited for {self.pulse.still:.0f} s in {self.pulse.doing}, at {beats[self.rank]['where']}"
        return self._against(self.rank, f"{what}; all ranks wait: in different calls, or for a device that has stopped")

    def _hang_verdict(self, rank: int, beat: dict[str, Any], seconds: float) -> FailureVerdict:
        what = f"hangs in {beat['doing']}: no progress for {seconds:.0f} s, at {beat['where']}"
        return self._against(rank, what, fix="; if it was only slow, set THRIFTY_HANG to more seconds")

    def _against(self, rank: int, what: str, fix: str = "", kill: bool = False) -> FailureVerdict:
        process = self.process(rank)
        text = f"rank {rank} on {process} {what}\n  fix: {restart_advice()}{fix}"
        return FailureVerdict(rank, text, kill=process.as_json().decode() if kill else "")
