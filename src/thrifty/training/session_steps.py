"""A training session: evaluation, checkpoints, records and stops around the training loop.

Each record is written and displayed. Then the session takes the actions that are due: an evaluation, a checkpoint, a
stop.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from thrifty.composition.index_check import explain_missing_rows
from thrifty.core.errors import ThriftyError
from thrifty.core.out_of_memory import explain_out_of_memory
from thrifty.core.ranks import rank, ranks
from thrifty.core.run_relative_settings import in_steps
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.training import checkpoint, heartbeat
from thrifty.training.determinism import deterministic_kernels
from thrifty.training.evaluation import evaluate, evaluation_interval, note_on_patience, see, try_measures
from thrifty.training.judged_measure import WITHOUT_GAIN, count, reason_to_stop, worth
from thrifty.training.loop import Record, train
from thrifty.training.memory_meter import MemoryMeter
from thrifty.training.rank_sync import ProcessGroupSync, SingleProcess
from thrifty.training.run_recorder import RunRecorder, finite
from thrifty.training.stop_signals import StopRequest
from thrifty.training.time_budget import RunLength
from thrifty.training.train_session import Steps, TrainSession

OWED = "owed_evaluation"
"""Counter of a state that was saved without its evaluation."""
SHOWN = 8
"""Number of held-out examples whose predictions the report shows."""


def session_steps(session: TrainSession, state: TrainState, meter: MemoryMeter) -> Steps:
    """Train, evaluate and save; return the summary, which is also in the run folder. A stop by a signal, an
    observer or the caller is not an error. The status in the summary is then "interrupted", and `exit_code` is the
    signal's exit code or 0."""
    together = ProcessGroupSync() if ranks() > 1 else SingleProcess()
    observer = _Observer(session, state, meter)
    observer.summarize("running", 0)
    with StopRequest(session.display.answer) as stop:
        for notice in session.notices:
            session.display.say(notice)
        try:
            with (
                explain_out_of_memory(meter.process + session.facts.get("predicted_memory", 0.0), session.remedy),
                heartbeat.explain_failure(observer.stopped),
                deterministic_kernels(session.run.device, session.recipe.deterministic),
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
        together.run_first(session.folder.remove_leftovers)
        # the signal handler stays, and no rank exits, until rank 0 has written the summary
        return together.run_first(
            lambda: observer.summarize(observer.status, 0 if observer.status == "finished" else stop.code)
        )


class _Observer(RunRecorder):
    def __init__(self, session: TrainSession, state: TrainState, meter: MemoryMeter):
        super().__init__(session, state, meter)
        self.saved_step = state.step if state.step else None
        self.also: set[int] = set()
        steps = session.lengths[0].steps if session.time_budget else session.run.steps
        self.evaluate_every = evaluation_interval(self.recipe, steps)
        if state.step == 0 and (note := note_on_patience(self.recipe, steps)):
            self.display.say(note)

    def follow(self, stop: StopRequest) -> Iterator[Record]:
        if self.recipe.evaluation.at_start and self.state.step == 0:
            self.display.phase("evaluating")
            self.evaluate(by_plan=True)
            self.state.counters["held_out_loss_at_start"] = self.held_out
        if self.state.step == 0:
            self.try_metrics()
        elif self.state.counters.pop(OWED, 0.0):
            self.evaluate(by_plan=True)
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
                with self.saved_on_errors(record, owed=is_planned):
                    self.evaluate(by_plan=is_planned)
                due = due or (is_planned and self.is_kept_as_best())
                early = reason_to_stop(self.recipe.evaluation, self.state.counters)
                record = replace(record, held_out_loss=self.held_out, metrics=self.measured)
            self.show(record, now=done or bool(early))
            with self.saved_on_errors(record):
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

    @contextmanager
    def saved_on_errors(self, record: Record, owed: bool = False) -> Iterator[None]:
        """Save the state before an error of the user's loss, metric or observer ends the run. With `owed`, the resumed
        run first repeats the evaluation."""
        try:
            yield
        except Exception:
            if ranks() == 1:  # other ranks may have no error, so they would not save
                self.state.counters |= {OWED: 1.0} if owed else {}
                with suppress(Exception):  # the user's error is the one to act on
                    self.refuse_lost_weights(record)
                    self.save()
            raise

    def try_metrics(self) -> None:
        """Call the user's metrics on a batch of held-out examples, so that most errors end the run before its first
        step."""
        assert self.state.model is not None
        run, batches = self.session.run, self.session.held_out
        if self.recipe.objects.metrics and batches:
            with self.timed("evaluation"), explain_missing_rows(run.plain, batches[:1]):
                try_measures(self.state.model, run.eval_objective, batches[0].to(run.device))

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
            {} if self.state.optimizer.eval_weights() is None else {"trained_loss": finite(self.measure()["loss"])}
        )
        metrics = {name: finite(value) for name, value in self.measured.items()}
        self.note("evaluation", loss=finite(self.held_out), **metrics, **trained)

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
            {"pictures": {name: addresses[row] for name, addresses in drawn.items()}, "loss": finite(loss)}
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


def _is_false(result: Any) -> bool:
    return isinstance(result, bool | np.bool_) and not result
