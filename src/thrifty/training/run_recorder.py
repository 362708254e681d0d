"""Records, progress and summary of a run."""

import math
from contextlib import suppress
from dataclasses import asdict
from threading import Lock
from typing import Any

from thrifty.core.errors import ThriftyError
from thrifty.core.ranks import rank
from thrifty.core.state import TrainState
from thrifty.training.loop import Record
from thrifty.training.memory_meter import MemoryMeter
from thrifty.training.progress_display import StepProgress
from thrifty.training.time_budget import SLOW_STEPS
from thrifty.training.train_session import TrainSession

WATCHED = 10
"""Number of steps without any gradient after which a parameter is named."""


class RunRecorder:
    """Writer of a run's records and summary, which are also shown."""

    def __init__(self, session: TrainSession, state: TrainState, meter: MemoryMeter):
        self.session, self.state, self.meter = session, state, meter
        self.recipe, self.folder = session.recipe, session.folder
        self.display = session.display
        self.held_out: float | None = None
        self.measured: dict[str, float] = {}
        """Metrics of the last evaluation without the loss."""
        self.last: Record | None = None
        self.evaluated_step: int | None = None
        self.status = "running"
        self.rate, self.memory = 0.0, 0.0
        self.slow_steps = SLOW_STEPS
        self.started_at = state.step
        self._ending, self._has_ended = Lock(), False

    def record(self, record: Record) -> None:
        if budget := self.session.time_budget:
            self.state.counters["used_seconds"] = budget.used(self.state.counters["seconds"])
        for change in record.changes:
            self.note("change", **(asdict(change) | {"step": record.step - 1}))
        rate = record.tokens / record.seconds
        self.rate = 0.9 * self.rate + 0.1 * rate if self.slow_steps <= 0 else rate
        self.slow_steps -= 1
        flops = self.session.facts.get("flops_per_step")
        self.memory = self.meter.now()
        self.note(
            "step",
            loss=finite(record.loss),
            learning_rate=record.learning_rate,
            gradient_norm=finite(record.gradient_norm),
            tokens=self.state.counters["tokens"],
            seconds=round(self.state.counters["seconds"], 4),
            step_seconds=round(record.seconds, 5),
            tokens_per_second=round(rate, 1),
            flops_per_second=flops / record.seconds if flops else None,
            memory=self.memory,
            skipped=record.skipped,
            notes=record.notes,
        )
        if record.step == min(self.started_at + WATCHED, self.session.run.steps):
            self.name_unreached()
        if record.skipped:
            self.say(f"step {record.step} skipped: loss {record.loss}, gradient norm {record.gradient_norm}")

    def name_unreached(self) -> None:
        assert self.state.optimizer is not None
        names = [name for name in self.state.optimizer.names if name in self.state.optimizer.unreached]
        if not names:
            return
        decays = [each.name for each in self.session.run.techniques if getattr(each, "weight_decay", None)]
        effect = f", but the weight decay of {decays[0]} changes them too" if decays else ""
        self.say(
            f"no gradient reached {len(names)} trained parameters, such as {names[0]!r}{effect}; if the loss does not "
            "use them: parameter.requires_grad_(False)"
        )

    def show(self, record: Record, now: bool) -> None:
        flops, peak = (self.session.facts.get(name) for name in ("flops_per_step", "peak_flops_per_second"))
        left = (self.session.run.steps - record.step) * record.tokens / self.rate
        left = None if left and self.slow_steps == SLOW_STEPS - 1 else left  # the first step may include compilation
        budget, used = self.session.time_budget, None
        if budget:
            used = self.state.counters["used_seconds"], budget.seconds
            left = budget.seconds - used[0]
        process, kept = self.meter.process, self.session.facts.get("kept_memory", 0.0)
        predicted = self.session.facts.get("predicted_memory")
        self.display.update(
            StepProgress(
                step=record.step,
                steps=self.session.run.steps,
                loss=record.loss,
                held_out=self.held_out,
                evaluated_step=self.evaluated_step,
                measured=self.measured,
                unit=self.session.facts.get("unit", "tokens"),
                tokens_per_second=self.rate,
                of_peak=flops / record.tokens * self.rate / peak if flops and peak else None,
                memory=process + self.memory,
                predicted_memory=process + predicted + kept if predicted else None,
                seconds_left=left,
                number_format=self.session.facts.get("peak_format", "float32"),
                used=used,
            ),
            now=now,
        )

    def say(self, text: str) -> None:
        self.display.say(text)
        self.note("notice", text=text)

    def note(self, kind: str, **values: Any) -> None:
        if rank() == 0:
            self.folder.append({"kind": kind, "step": self.state.step} | values)

    def stopped(self, text: str, exit_code: int = 1) -> None:
        """Write the reason for the end of the run, once. Two threads may call this at the same time."""
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
            with suppress(ThriftyError):  # if the disk is full, the first message is the one to act on
                self.note("notice", text=text)
                self.summarize("stopped", exit_code, error=text)

    def peak(self) -> dict[str, float]:
        """Return the memory of the process before the run, and the peak above it, over all parts of a resumed run."""
        facts = self.session.facts
        process = facts.get("process_memory", self.meter.process)
        peak = self.meter.process + self.meter.peak() - process
        return {"peak_memory": max(peak, facts.get("peak_memory", 0.0)), "process_memory": process}

    def summarize(self, status: str, exit_code: int, **more: str) -> dict[str, Any]:
        counters = self.state.counters
        if budget := self.session.time_budget:
            self.session.facts["used_seconds"] = budget.used(counters.get("seconds", 0.0))
        summary = {
            "status": status,
            "exit_code": exit_code,
            "steps": self.state.step,
            "tokens": counters.get("tokens", 0),
            "seconds": counters.get("seconds", 0.0),
            "loss": finite(self.last.loss) if self.last else None,
            "held_out_loss": finite(self.held_out),
            "evaluated_step": self.evaluated_step,
            **({"held_out": {name: finite(value) for name, value in self.measured.items()}} if self.measured else {}),
            "held_out_loss_at_start": finite(counters.get("held_out_loss_at_start")),
            "best_held_out_loss": finite(counters.get("best_held_out_loss")),
            "skipped_steps": int(counters.get("skipped", 0)),
            **self.session.facts,
            **self.peak(),
            **more,
        }
        if rank() == 0:
            self.folder.write_json("summary", summary)
        return summary


def finite(value: float | None) -> float | None:
    """Return None for a value that is not finite, because JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
