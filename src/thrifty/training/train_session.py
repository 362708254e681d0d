"""A training session: evaluation, checkpoints, records and stops around the training loop.

Each record is written and displayed. Then the session takes the actions that are due: an evaluation, a checkpoint, a
stop.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from thrifty.composition.compose import Run
from thrifty.composition.index_check import explain_missing_rows
from thrifty.core.batches import Batch
from thrifty.core.errors import ThriftyError
from thrifty.core.out_of_memory import explain_out_of_memory
from thrifty.core.ranks import rank, ranks
from thrifty.core.recipe import Recipe
from thrifty.core.run_relative_settings import in_steps
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.training import checkpoint, heartbeat
from thrifty.training.determinism import deterministic_kernels
from thrifty.training.evaluation import evaluate, evaluation_interval, note_on_patience, see
from thrifty.training.judged_measure import WITHOUT_GAIN, count, reason_to_stop, worth
from thrifty.training.loop import Record, train
from thrifty.training.memory_meter import MemoryMeter
from thrifty.training.progress_display import ProgressDisplay, StepProgress
from thrifty.training.rank_sync import ProcessGroupSync, SingleProcess
from thrifty.training.run_folder import RunFolder
from thrifty.training.stop_signals import StopRequest
from thrifty.training.time_budget import SLOW_STEPS, RunLength, TimeBudget

Steps = Generator[Record, None, dict[str, Any]]
"""Generator of a run's records, one per step. Its return value is the summary. A generator that is closed early saves
the run."""
Observer = Callable[[Record], Any]
"""Function that receives each record, with the evaluation if one was due. The run stops if the function returns
False."""
SHOWN = 8
"""Number of held-out examples whose predictions the report shows."""


@dataclass
class TrainSession:
    """A run in training: its data, folder, settings and observers."""

    resume_facts: Mapping[str, Any]
    """JSON values stored in each checkpoint in addition to the state: recipe, identity of the data. A resume compares
    these values to detect changes."""
    recipe: Recipe
    run: Run
    held_out: Sequence[Batch]
    folder: RunFolder
    facts: dict[str, Any] = field(default_factory=dict)
    """Known values that the summary repeats: facts of the data (unigram_entropy, bytes_per_token; label_entropy,
    unit), predicted_memory, peak_flops_per_second, flops_per_step."""
    notices: Sequence[str] = ()
    """Notices for the user before the first step, such as a damaged checkpoint that was skipped."""
    display: ProgressDisplay = field(default_factory=lambda: ProgressDisplay(quiet=True))
    remedy: Callable[[float], str] | None = None
    """Function that maps the available bytes to the fix for an out-of-memory error."""
    drawn: Callable[[Tensor], list[str]] | None = None
    """Function that maps images (b, c, h, w), scaled as the model's inputs, to data URLs; None for data without
    images."""
    observers: Sequence[Observer] = ()
    time_budget: TimeBudget | None = None
    """Budget in seconds; None if the number of steps is fixed."""
    lengths: list[RunLength] = field(default_factory=list)
    """Numbers of steps of the run so far: the first, and each change."""
    recorded: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Changes of the number of steps that an interrupted run recorded after its last checkpoint, by step."""

    def steps(self, state: TrainState, meter: MemoryMeter) -> Steps:
        """Train, evaluate and save; return the summary, which is also in the run folder. A stop by a signal, an
        observer or the caller is not an error. The status in the summary is then "interrupted", and `exit_code` is the
        signal's exit code or 0."""
        together = ProcessGroupSync() if ranks() > 1 else SingleProcess()
        observer = _Observer(self, state, meter)
        observer.summarize("running", 0)
        with StopRequest(self.display.say) as stop:
            for notice in self.notices:
                self.display.say(notice)
            try:
                with (
                    explain_out_of_memory(meter.process + self.facts.get("predicted_memory", 0.0), self.remedy),
                    heartbeat.explain_failure(observer.stopped),
                    deterministic_kernels(self.run.device, self.recipe.deterministic),
                ):
                    for record in observer.follow(stop):
                        try:
                            yield record
                        except GeneratorExit:
                            stop.ask()
            except Exception as error:
                text = str(error) if isinstance(error, ThriftyError) else f"{type(error).__name__}: {error}"
                observer.stopped(text, getattr(error, "exit_code", 1))
                raise
            together.run_first(self.folder.remove_leftovers)
            # the signal handler stays, and no rank exits, until rank 0 has written the summary
            return together.run_first(
                lambda: observer.summarize(observer.status, 0 if observer.status == "finished" else stop.code)
            )


class _Observer:
    def __init__(self, session: TrainSession, state: TrainState, meter: MemoryMeter):
        self.session, self.state, self.meter = session, state, meter
        self.recipe, self.folder = session.recipe, session.folder
        self.display = session.display
        self.held_out: float | None = None
        self.measured: dict[str, float] = {}
        """Metrics of the last evaluation without the loss."""
        self.last: Record | None = None
        self.saved_step = state.step if state.step else None
        self.evaluated_step: int | None = None
        self.status = "running"
        self.rate, self.memory = 0.0, 0.0
        self.slow_steps = SLOW_STEPS
        self.also: set[int] = set()
        steps = session.lengths[0].steps if session.time_budget else session.run.steps
        self.evaluate_every = evaluation_interval(self.recipe, steps)
        self.started_at = state.step
        if state.step == 0 and (note := note_on_patience(self.recipe, steps)):
            self.display.say(note)
        self._ending, self._has_ended = Lock(), False

    def follow(self, stop: StopRequest) -> Iterator[Record]:
        if self.recipe.evaluation.at_start and self.state.step == 0:
            self.display.phase("evaluating")
            self.evaluate(by_plan=True)
            self.state.counters["held_out_loss_at_start"] = self.held_out
        heartbeat.at(f"step {self.state.step + 1}", step=True)
        early = reason_to_stop(self.recipe.evaluation, self.state.counters)
        is_compiled = any(technique.stage is Stage.COMPILE for technique in self.session.run.techniques)
        self.display.phase("compiling and making the first step" if is_compiled else "making the first step")
        for record in () if early else self.records():
            self.display.started()
            self.last = record
            self.record(record)
            done = record.step == self.session.run.steps
            due = done or record.step % self.recipe.checkpoints.every == 0 or record.step in self.also
            # evaluate before each scheduled save, so that the best checkpoint is one that was measured
            is_planned = due or record.step % self.evaluate_every == 0
            if is_pause := self.started_at < self.pause_step <= record.step and not done:
                stop.ask()
            if is_planned or is_pause:
                self.evaluate(by_plan=is_planned)
                due = due or (is_planned and self.is_kept_as_best())
                early = reason_to_stop(self.recipe.evaluation, self.state.counters)
                record = replace(record, held_out_loss=self.held_out, metrics=self.measured)
            self.show(record, now=done or bool(early))
            if any([_is_false(observer(record)) for observer in self.session.observers]):
                stop.ask()
            yield record
            stopping = stop.agreed()
            if stopping and record.skipped and self.evaluated_step != record.step:
                self.evaluate()
            if due or stopping or early:
                self.refuse_lost_weights(record)
                self.save()
            if early and not done:
                self.say(f"stopped early after step {record.step}: {early}")
                break
            if stopping and not done:
                self.session.facts["resume"] = line = self.recipe.resume_line(self.folder.path)
                self.display.say(f"stopped {stop.reason} at step {record.step}, which is saved")
                self.display.say(f"resume by: {line}")
                self.status = "interrupted"
                return
            heartbeat.at(f"step {record.step + 1}", step=True)
        if self.held_out is None:  # the run was killed between its last checkpoint and its end
            self.evaluate()
        self.session.facts |= {"stopped_early": early} if early else {}
        self.status = "finished"

    def records(self) -> Iterator[Record]:
        """Yield the records of all steps. The loop starts again after each change of the number of steps."""
        self.plan_saves(0)
        is_changed = True
        while is_changed:
            is_changed = False
            for record in train(self.session.run, self.state, self.recipe.seed):
                yield record
                if is_changed := self.change_length(record):
                    break

    def plan_saves(self, now: int) -> None:
        """Set the steps of additional checkpoints after step `now`."""
        steps = {in_steps(moment, self.session.run.steps) for moment in self.recipe.checkpoints.extra_steps}
        self.also = {step for step in self.also if step <= now} | {step for step in steps if step > now}

    @property
    def pause_step(self) -> int:
        """Step after which the run pauses; 0 if it never pauses."""
        moment = self.recipe.checkpoints.pause_at
        return 0 if moment is None else in_steps(moment, self.session.run.steps)

    def change_length(self, record: Record) -> bool:
        """Repeat a recorded change of the number of steps, or adapt the number to a budget in seconds. Return True if
        the number changed."""
        change, budget = self.session.recorded.get(record.step), self.session.time_budget
        if budget:
            every = {"evaluation": self.evaluate_every, "checkpoint": self.recipe.checkpoints.every}
            steps = budget.changed_steps(self.session.run, record, self.state.counters, every)
            if steps and not change:
                used = round(budget.used(self.state.counters["seconds"]), 3)
                change = {"kind": "length", "steps": steps, "used": used, "budget": budget.seconds}
        if not change:
            return False
        for text in self.session.run.change_length(change["steps"], record.step):
            self.say(text)
        self.plan_saves(record.step)
        self.note(**change)
        self.session.lengths.append(RunLength(record.step, change["steps"]))
        return True

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        with self.session.time_budget.work(kind) if self.session.time_budget else nullcontext():
            yield

    def refuse_lost_weights(self, record: Record) -> None:
        """Raise ThriftyError if neither the last step nor the evaluation has a finite loss. A checkpoint of these
        weights would replace the last good checkpoint."""
        if record.skipped and self.held_out is not None and not math.isfinite(self.held_out):
            newest = f"the newest checkpoint is of step {self.saved_step}" if self.saved_step else "none was saved"
            raise ThriftyError(
                f"the loss of step {record.step} is not finite: {record.loss} in training, {self.held_out} on "
                f"held-out examples; its weights are not saved, and {newest}",
                fix="lower the learning rate, or add gradients.clip; then resume by: "
                + self.recipe.resume_line(self.folder.path, fork="NAME"),
            )

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
            loss=_finite(record.loss),
            learning_rate=record.learning_rate,
            gradient_norm=_finite(record.gradient_norm),
            tokens=self.state.counters["tokens"],
            seconds=round(self.state.counters["seconds"], 4),
            step_seconds=round(record.seconds, 5),
            tokens_per_second=round(rate, 1),
            flops_per_second=flops / record.seconds if flops else None,
            memory=self.memory,
            skipped=record.skipped,
            notes=record.notes,
        )
        if record.skipped:
            self.say(f"step {record.step} skipped: loss {record.loss}, gradient norm {record.gradient_norm}")

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

    def evaluate(self, by_plan: bool = False) -> None:
        """Evaluate the model. Only evaluations with `by_plan` count for an early stop."""
        assert self.state.optimizer is not None
        with self.timed("evaluation"), self.state.optimizer.use_eval_weights():
            self.measured = self.measure()
            self.show_predictions()
        self.held_out = self.measured.pop("loss")
        self.evaluated_step = self.state.step
        best = self.state.counters.get("best_held_out_loss", math.inf)
        self.state.counters["best_held_out_loss"] = min(best, self.held_out)
        if by_plan:
            count(self.recipe.evaluation, self.state.counters, self.worth())
        # if an average of the weights is judged, measure the weights in training too
        trained = (
            {} if self.state.optimizer.eval_weights() is None else {"trained_loss": _finite(self.measure()["loss"])}
        )
        metrics = {name: _finite(value) for name, value in self.measured.items()}
        self.note("evaluation", loss=_finite(self.held_out), **metrics, **trained)

    def is_kept_as_best(self) -> bool:
        """Return True if the last planned evaluation is the best so far, and the run may stop early."""
        return self.recipe.evaluation.patience is not None and self.state.counters[WITHOUT_GAIN] == 0

    def worth(self) -> float:
        assert self.held_out is not None
        return worth(self.recipe.evaluation, self.held_out, self.measured)

    def measure(self) -> dict[str, float]:
        assert self.state.model is not None
        run = self.session.run
        batches = heartbeat.report_progress(self.session.held_out, f"the evaluation after step {self.state.step}")
        say = self.say if self.evaluated_step is None else lambda text: None
        with explain_missing_rows(run.plain, self.session.held_out):
            return evaluate(self.state.model, run.eval_objective, batches, run.device, say)

    def show_predictions(self) -> None:
        """Write previews of the first held-out examples to the run folder for the report."""
        objective, draw = self.session.run.eval_objective, self.session.drawn
        if not objective.pictured or draw is None:
            return
        assert self.state.model is not None
        predictions = see(self.state.model, objective, self.session.held_out[0], SHOWN, self.session.run.device)
        if rank() > 0 or not predictions.pictures:
            return
        drawn = {name: draw(images) for name, images in predictions.pictures.items()}
        shown = [
            {"pictures": {name: addresses[row] for name, addresses in drawn.items()}, "loss": _finite(loss)}
            for row, loss in enumerate(predictions.losses)
        ]
        self.folder.write_json("pictures", {"step": self.state.step, "about": objective.pictured, "shown": shown})

    def _is_best_saved(self) -> bool:
        """Return True if this state was evaluated and is better than every saved state. Evaluations of unsaved states
        are ignored."""
        if self.held_out is None or self.evaluated_step != self.state.step:
            return False
        best = self.state.counters.get("best_saved_loss", math.inf)
        self.state.counters["best_saved_loss"] = min(best, self.worth())
        return self.worth() < best

    def save(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.folder.refuse_moved()
        with self.timed("checkpoint"):
            self._save()

    def _save(self) -> None:
        best = self._is_best_saved()
        heartbeat.at(f"the checkpoint of step {self.state.step}")
        records = {"records": self.folder.seal_records()} if rank() == 0 else {}
        saved = checkpoint.save(
            self.folder.checkpoints,
            self.state.step,
            self.state.tensors(),
            {
                **self.state.scalars(),
                **self.session.resume_facts,
                "steps": self.session.run.steps,
                "lengths": [list(length) for length in self.session.lengths],
                **records,
                "source": self.session.run.plain.source.state(),
            },
            best=best,
            keep=self.recipe.checkpoints.keep,
            also=self.also,
            ranks=ProcessGroupSync() if ranks() > 1 else SingleProcess(),
        )
        self.saved_step = self.state.step
        self.note("checkpoint", seconds=round(saved.seconds, 4), bytes=saved.bytes)
        for notice in saved.notices:
            self.say(notice)

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
            "loss": _finite(self.last.loss) if self.last else None,
            "held_out_loss": _finite(self.held_out),
            "evaluated_step": self.evaluated_step,
            **({"held_out": {name: _finite(value) for name, value in self.measured.items()}} if self.measured else {}),
            "held_out_loss_at_start": _finite(counters.get("held_out_loss_at_start")),
            "best_held_out_loss": _finite(counters.get("best_held_out_loss")),
            "skipped_steps": int(counters.get("skipped", 0)),
            **self.session.facts,
            **self.peak(),
            **more,
        }
        if rank() == 0:
            self.folder.write_json("summary", summary)
        return summary


def _is_false(result: Any) -> bool:
    return isinstance(result, bool | np.bool_) and not result


def _finite(value: float | None) -> float | None:
    """Return None for a value that is not finite, because JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
