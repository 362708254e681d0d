"""Comparison of variants at equal budget.

A step of each variant is counted without training, which sets the budgets of all runs. For equal time, pilots measure
the first number of steps. Trials choose the learning rate of each variant. Then each variant runs with all seeds.
Pilots, trials and seeds are ordinary training runs with their own folders. The comparison's folder contains

    comparison.json            record of the comparison, see `comparison_protocol.py`
    report.html                the same record as a page
    VARIANT-count.json         counted step and peak speed of the machine, which all runs of the variant reuse
    VARIANT-pilot-0, VARIANT-trial-0, VARIANT-seed-0, …   run folders of "baseline", "variant-1", …

Runs of different variants alternate, so that all variants meet the same machine conditions. The same call resumes an
interrupted or killed comparison, also in the middle of a run. Failed runs are kept and counted.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from thrifty.comparing.comparison_protocol import ComparisonProtocol, claim_folder
from thrifty.comparing.comparison_summary import made_steps, read_run_result, summarize_comparison
from thrifty.comparing.comparison_workers import run_on_workers
from thrifty.comparing.equal_budgets import (
    StepCost,
    budgets_of_variants,
    counted_budget,
    measured_step,
    planned_budget,
    refuse_undecayed,
)
from thrifty.comparing.run_launchers import RunLauncher, RunStopped, SameProcess, Worker, closing_workers
from thrifty.comparing.run_process import COUNT
from thrifty.comparing.variants import Variant, evaluated_like
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError, spelled
from thrifty.core.old_names import rename_comparison
from thrifty.core.plain_values import differences
from thrifty.core.recipe import Budget, Recipe
from thrifty.reporting.comparison_charts import judged_value
from thrifty.reporting.comparison_page import write_comparison_page
from thrifty.reporting.number_format import duration, significant
from thrifty.training.evaluation import FORWARD
from thrifty.training.input_identity import input_identity, refuse_changed_inputs
from thrifty.training.run_folder import RunFolder

EVALUATIONS = 20
"""Number of evaluations in each run. They show when a run reaches a given quality."""
EVALUATION_COST = 0.5
"""Maximum work of these evaluations relative to that of training steps."""
TRIAL_SEED = 10_000
"""Number added to the seeds of trials, so that learning rates are not chosen on the compared seeds."""
CORRECT = "correct the variant or remove it, then compare again"
SAME_PROCESS = "all runs used one process, in which peak memory includes allocations of earlier runs"
Say = Callable[[str], None]


def compare(
    variants: Sequence[Variant],
    protocol: ComparisonProtocol,
    folder: Path,
    *,
    retry: bool = False,
    workers: Sequence[RunLauncher] = (),
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Run the whole comparison; return the content of comparison.json, with its "folder" and "exit_code".

    `workers` run in parallel. Without workers, runs are executed one after another on this machine. `retry` repeats
    failed runs. Raises UsageError if the folder holds a different comparison, a learning rate does not decay, or a
    variant fails before or soon after its first step. Raises InfeasibleError if a budget is below one step.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "a comparison starts its runs itself, from one process", fix="start the comparison without torchrun"
        )
    for variant in variants:
        variant.recipe.refuse_missing_objects()
    if protocol.trials > 1 and (without := [variant.label for variant in variants if variant.rate is None]):
        raise UsageError(f"{without[0]}: its optimizer has no learning rate to search", fix="--rate-trials 1")
    if steps := variants[0].recipe.budget.steps:
        refuse_undecayed(variants, dict.fromkeys((variant.label for variant in variants), steps))
    workers = workers or (Worker(),)
    with claim_folder(folder, variants, protocol) as opened, closing_workers(workers):
        comparison = _ComparisonRunner(variants, protocol, opened, workers, say, retry)
        comparison.refuse_changed_inputs()
        if any(isinstance(worker, SameProcess) for worker in comparison.workers):
            comparison.state["cautions"] = [SAME_PROCESS]
        return comparison.run_all()


class _ComparisonRunner:
    def __init__(
        self,
        variants: Sequence[Variant],
        protocol: ComparisonProtocol,
        folder: RunFolder,
        workers: Sequence[RunLauncher],
        say: Say,
        retry: bool,
    ):
        self.protocol, self.folder, self.workers, self.say = protocol, folder, workers, say
        self.write_lock = Lock()
        """Lock that a thread holds while it records a run."""
        self.state = rename_comparison(folder.read_json("comparison"))
        for name in ("error", "outcome"):  # left by an interrupted call
            self.state.pop(name, None)
        self.variants = [
            replace(variant, folder=self.state["folders"][variant.label]) for variant in variants
        ]  # the order may have changed
        self.runs = {entry["run"]: entry for entry in self.state["runs"]}
        if retry:
            self.forget_failures()
        trials = protocol.trials if protocol.trials > 1 else 0
        self.planned = len(variants) * ((protocol.equal == "time") + trials + protocol.seeds)
        self.finished, self.first_end = 0, math.inf

    def refuse_changed_inputs(self) -> None:
        """Raise UsageError if the data or given weights have changed since an earlier call."""
        if before := self.state.get("inputs"):
            is_finished = len(self.runs) >= self.planned
            refuse_changed_inputs(self.folder.path, before, self.inputs(), self.say, is_finished)

    def inputs(self) -> dict[str, str]:
        """Return the identity of the data and of given weights."""
        return input_identity({variant.label: variant.recipe for variant in self.variants}, self.say)

    def forget_failures(self) -> None:
        """Remove failed runs from the record, so that they run again. Failed trials stay if a run with a compared seed
        exists, because repeated trials could change the chosen learning rate.
        """
        chosen = any("seed" in entry for entry in self.runs.values())
        for run in [run for run, entry in self.runs.items() if entry["status"] == "failed"]:
            if not (chosen and "trial" in self.runs[run]):
                del self.runs[run]

    def run_all(self) -> dict[str, Any]:
        done = f"; {len(self.runs)} of them are done" if self.runs else ""
        self.say(f"the comparison takes {self.planned} runs{done}")
        try:
            if "budgets" not in self.state:
                self.state["budgets"] = self.plan()
                self.write_state("running", 0)
            budgets = {label: planned_budget(planned) for label, planned in self.state["budgets"].items()}
            tuned = [self.tuned(variant) for variant in self.variants] if self.trials(budgets) else self.variants
            self.seeds(tuned, budgets)
        except RunStopped as stopped:
            return self.write_state("interrupted", stopped.exit_code)
        except ThriftyError as error:
            self.state["error"] = str(error)
            self.write_state("stopped", error.exit_code)
            raise
        except BaseException as ended:
            self.write_state("interrupted", getattr(ended, "code", 1))
            again = spelled("command", "call")
            self.say(f"interrupted after {len(self.runs)} of {self.planned} runs; the same {again} continues")
            raise
        labels = [variant.label for variant in self.variants]
        entries = [entry for entry in self.runs.values() if "seed" in entry]
        self.state["outcome"] = summarize_comparison(entries, labels, self.protocol, self.variants[0].recipe.evaluation)
        return self.write_state("finished", 0)

    def write_state(self, status: str, exit_code: int) -> dict[str, Any]:
        self.state |= {"status": status, "exit_code": exit_code, "runs": list(self.runs.values())}
        self.folder.write_json("comparison", self.state)
        if status != "running":
            write_comparison_page(self.folder.path)
        return self.folder.read_json("comparison") | {"folder": str(self.folder.path)}

    def plan(self) -> dict[str, Any]:
        """Count a step of each variant and return the budgets by label. Raises UsageError if counting or a pilot fails,
        if held-out data differ, or if a learning rate does not decay.
        """
        equal, costs = self.protocol.equal, self.count()
        self.state["inputs"] = self.inputs()
        seconds = {variant.label: self.pilot(variant, costs) for variant in self.variants} if equal == "time" else {}
        budgets = budgets_of_variants(self.variants, costs, equal, seconds)
        planned = {label: costs[label].planned(budget, seconds.get(label)) for label, budget in budgets.items()}
        refuse_undecayed(self.variants, {label: budget["steps"] for label, budget in planned.items()})
        for label, budget in planned.items():
            adapted = f", in {duration(budget['seconds'])} of training" if equal == "time" else ""
            self.say(f"{label}: {'about ' * (equal == 'time')}{budget['steps']:,} steps a run{adapted}")
        if equal == "time" and (left := self.planned - len(self.runs)):
            pilots = [entry["elapsed"] for entry in self.runs.values() if "pilot" in entry]
            whole = [budget["seconds"] + (max(pilots) if pilots else 0.0) for budget in planned.values()]
            whole_duration = left / len(self.variants) / len(self.workers) * sum(whole)
            self.say(f"about {duration(whole_duration)} in all, with starts and evaluations")
        return planned

    def count(self) -> dict[str, StepCost]:
        """Return the counted cost of a step by label; the baseline's cost has its number of steps."""
        costs: dict[str, StepCost] = {}
        budget = counted_budget(self.variants[0].recipe.budget, self.protocol.equal, self.protocol.pilot)
        for variant in self.variants:
            recipe = replace(variant.recipe, name=f"{variant.folder}{COUNT}", budget=budget)
            ended, cost = self.workers[0].count(recipe, self.folder.path)
            if ended.status == "interrupted":
                raise RunStopped(ended.exit_code)
            if cost is None:
                kind = InfeasibleError if ended.exit_code == InfeasibleError.exit_code else UsageError
                what, _, fix = ended.error.partition(" fix: ")
                raise kind(f"{variant.label} fails before its first step: {what}", fix=fix or CORRECT)
            if not costs:
                judged_on, budget = cost.judged_on, Budget(steps=cost.steps, counts=budget.counts)
            if other := differences(judged_on, cost.judged_on):
                raise UsageError(
                    f"{variant.label} is not comparable with the baseline: {'; '.join(other)}",
                    fix="use the same data and the same tokenizer for all variants",
                )
            costs[variant.label] = cost
        return costs

    def pilot(self, variant: Variant, costs: Mapping[str, StepCost]) -> float:
        """Run a pilot and return its step time in seconds. Raises UsageError if the pilot fails."""
        name, steps = f"{variant.folder}-pilot-0", min(self.protocol.pilot, costs[self.variants[0].label].steps)
        recipe = self.recipe(variant, name, Budget(steps=steps, counts="training"), 0, evaluations=1)
        entry = self.run(self.workers[0], recipe, variant=variant.label, pilot=0)
        if entry["status"] == "failed":
            raise UsageError(f"{variant.label} fails in its pilot of {steps} steps: {entry['error']}", fix=CORRECT)
        return measured_step(self.folder.path / name)

    def trials(self, budgets: Mapping[str, Budget]) -> bool:
        """Run all variants at all trial learning rates; return True if the protocol has trials."""
        if self.protocol.trials == 1:
            return False

        def at_rate(worker: RunLauncher, turn: int, factor: float) -> None:
            for variant in _turned(self.variants, turn):
                name = f"{variant.folder}-trial-{turn}"
                recipe = self.recipe(variant.at_rate(factor), name, budgets[variant.label], TRIAL_SEED)
                self.run(worker, recipe, variant=variant.label, trial=turn, factor=factor)

        rates = enumerate(self.protocol.factors)
        run_on_workers(self.workers, [partial(at_rate, turn=turn, factor=factor) for turn, factor in rates])
        return True

    def seeds(self, variants: Sequence[Variant], budgets: Mapping[str, Budget]) -> None:
        """Run all variants with all seeds."""

        def with_seed(worker: RunLauncher, seed: int) -> None:
            for variant in _turned(variants, seed):
                recipe = self.recipe(variant, f"{variant.folder}-seed-{seed}", budgets[variant.label], seed)
                self.run(worker, recipe, variant=variant.label, seed=seed)

        run_on_workers(self.workers, [partial(with_seed, seed=seed) for seed in range(self.protocol.seeds)])

    def tuned(self, variant: Variant) -> Variant:
        """Return the variant with the learning rate of its best trial. Raises ThriftyError if all trials failed."""
        assert variant.rate is not None
        entries = [self.runs[f"{variant.folder}-trial-{turn}"] for turn in range(self.protocol.trials)]
        settings = self.variants[0].recipe.evaluation
        judged = [judged_value(entry, settings.judge) if entry["status"] == "finished" else None for entry in entries]
        done = [(value, entry) for value, entry in zip(judged, entries, strict=True) if value is not None]
        if not done:
            raise ThriftyError(
                f"{variant.label} failed at every learning rate: {entries[0].get('error', 'no held-out value')}",
                fix="lower its learning rate, and use another name for the comparison",
            )
        best = (min if settings.is_lower_better else max)(done, key=lambda pair: pair[0])[1]
        self.state.setdefault("rates", {})[variant.label] = {
            "lr": variant.rate * best["factor"],
            "factor": best["factor"],
            "tuned": list(variant.rates),
            "trials": [
                {"lr": variant.rate * entry["factor"], "held_out_loss": entry.get("held_out_loss"), "judged": value}
                for entry, value in zip(entries, judged, strict=True)
            ],
            "at_edge": best["factor"] in (self.protocol.factors[0], self.protocol.factors[-1]),
        }
        return variant.at_rate(best["factor"])

    def recipe(self, variant: Variant, name: str, budget: Budget, seed: int, evaluations: int = EVALUATIONS) -> Recipe:
        """Return the recipe of one run of a variant, with the baseline's evaluation settings."""
        baseline, steps = self.variants[0].recipe, budget.steps or budget.estimate or 1
        settings, batch = evaluated_like(baseline, variant.recipe), baseline.data.batch
        every = max(1, steps // evaluations, math.ceil(FORWARD * settings.examples / batch / EVALUATION_COST))
        return replace(
            variant.recipe,
            name=name,
            seed=variant.recipe.seed + seed,
            budget=budget,
            evaluation=replace(settings, every=every, at_start=False, patience=None),
            checkpoints=replace(variant.recipe.checkpoints, keep=1, extra_steps=(), pause_at=None),
        )

    def run(self, worker: RunLauncher, recipe: Recipe, **place: Any) -> dict[str, Any]:
        """Run a recipe to the end and return the record of the run. Raises RunStopped if the run was stopped, and
        UsageError if the first run of a variant fails within its first steps.
        """
        name = recipe.name
        if (before := self.runs.get(name)) and before["status"] in ("finished", "failed"):
            return self.checked(before)
        if (self.folder.path / name).is_dir() and made_steps(self.folder.path / name):
            with self.write_lock:
                restarts = self.state.setdefault("restarts", {})
                restarts[name] = restarts.get(name, 0) + 1
        ended = worker(recipe, self.folder.path)
        rates = Variant("", "", recipe).rates
        entry = {"run": name, **place, **({"lr": rates["lr"]} if rates else {}), **ended.as_data()}
        if entry["status"] == "interrupted":
            raise RunStopped(ended.exit_code)
        if entry["status"] == "finished":
            restarts = self.state.get("restarts", {}).get(name, 0)
            entry |= read_run_result(self.folder.path / name, recipe.evaluation.judge, restarts)
            entry["elapsed"] = max(entry["elapsed"], entry["seconds_with_starts"])  # of all processes of the run
            if entry["held_out_loss"] is None:
                entry |= {"status": "failed", "error": "its held-out loss is not finite"}
        with self.write_lock:
            self.runs[name] = entry
            if "pilot" not in entry:
                self.finished += 1
                self.first_end = min(self.first_end, time.monotonic())
            self.write_state("running", 0)
            self.say(self.progress(entry))
        return self.checked(entry)

    def checked(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a run. Raises UsageError if no run of the variant finished, and this run, the first with
        the whole budget, failed within the steps of a pilot.
        """
        if entry["status"] == "finished" or "pilot" in entry or entry.get("trial", entry.get("seed")):
            return entry
        done = any(
            other["variant"] == entry["variant"] and other["status"] == "finished" for other in self.runs.values()
        )
        if not done and made_steps(self.folder.path / entry["run"]) < self.protocol.pilot:
            raise UsageError(
                f"{entry['variant']} fails within the first {self.protocol.pilot} steps of its first run: "
                f"{entry['error']}",
                fix=f"{CORRECT} under another --name; or --retry, if the cause is outside the variant",
            )
        return entry

    def progress(self, entry: Mapping[str, Any]) -> str:
        of_each = entry["elapsed"]
        if self.finished > 1:  # without the first run, which includes the start of the server and first compilations
            of_each = (time.monotonic() - self.first_end) / (self.finished - 1)
        left = 0.0 if "pilot" in entry else of_each * (self.planned - len(self.runs))
        loss = entry.get("held_out_loss")
        is_finished = entry["status"] == "finished"
        result = f"held-out loss {significant(loss, 4)}" if is_finished else f"failed: {entry['error']}"
        kind = next(f"{kind} {entry[kind]}" for kind in ("pilot", "trial", "seed") if kind in entry)
        kind += f" at lr {entry['lr']:.3g}" if "trial" in entry and "lr" in entry else ""
        took = duration(entry["elapsed"]) + (f"; about {duration(left)} left" if left else "")
        return f"[{len(self.runs)}/{self.planned}] {entry['variant']}, {kind}: {result} ({took})"


def _turned(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """Return the variants rotated by `turn`, because machine conditions may change while the variants run."""
    first = turn % len(variants)
    return [*variants[first:], *variants[:first]]
