"""Comparison of variants at equal budget.

Pilots measure the cost of a step. Trials choose the learning rate of each variant. Then each variant runs with all
seeds. All of these are ordinary training runs with their own folders. The comparison's folder contains

    comparison.json            record of the comparison, see `comparison_protocol.py`
    report.html                the same record as a page
    ARM-pilot-0, ARM-trial-0, ARM-seed-0, …   run folders; ARM is "baseline", "arm-1", "arm-2", …

Runs of different variants alternate, so that all variants meet the same machine conditions. The same call resumes an
interrupted or killed comparison, also in the middle of a run. Failed runs are kept and counted.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from thrifty.comparing.comparison_protocol import ComparisonProtocol, claim_folder
from thrifty.comparing.comparison_summary import read_run_result, summarize_comparison
from thrifty.comparing.comparison_workers import run_on_workers
from thrifty.comparing.equal_budgets import StepCost, mean_cost, refuse_undecayed, step_cost, steps_of_variants
from thrifty.comparing.run_launchers import RunLauncher, SameProcess, Worker
from thrifty.comparing.variants import Variant
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError
from thrifty.core.old_names import rename_comparison
from thrifty.core.plain_values import differences
from thrifty.core.recipe import Budget, Recipe
from thrifty.reporting.comparison_charts import judged_value
from thrifty.reporting.comparison_page import write_comparison_page
from thrifty.reporting.number_format import duration, significant
from thrifty.training.run_folder import RunFolder

TIMED_PILOTS = 2
"""Number of timed pilots per variant for budgets of equal time. Pilots of different variants alternate, so that a slow
phase of the machine affects all variants. The first pilot measures how many steps later pilots need. If the first pilot
already has as many steps, it counts as timed. For other budgets, each variant has one pilot.
"""
MOST_PILOTS = 6
"""Maximum number of pilots per variant. Pilots are added while the step times of a variant's last two pilots differ too
much.
"""
PILOTS_APART = 0.05
"""Maximum relative difference between the step times of a variant's last two pilots, for budgets of equal time."""
PILOT_SECONDS = 5.0
"""Minimum total time in seconds of a pilot's timed steps. A pilot never exceeds the steps of the baseline's budget."""
EVALUATIONS = 20
"""Number of evaluations in each run. They show when a run reaches a given quality."""
TRIAL_SEED = 10_000
"""Number added to the seeds of trials, so that learning rates are not chosen on the compared seeds."""
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
    pilot fails. Raises InfeasibleError if a budget is below one step, or if step times of pilots do not agree.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "a comparison starts its runs itself, from one process", fix="start the comparison without torchrun"
        )
    for variant in variants:
        variant.recipe.refuse_missing_objects()
    if protocol.trials > 1 and (without := [variant.label for variant in variants if variant.rate is None]):
        raise UsageError(f"{without[0]}: its optimizer has no learning rate to search", fix="--rate-trials 1")
    refuse_undecayed(variants, variants[0].recipe.budget.steps or protocol.pilot)
    workers = workers or (Worker(),)
    with claim_folder(folder, variants, protocol) as opened, ExitStack() as ends:
        for worker in workers:
            ends.callback(worker.close)
        comparison = _ComparisonRunner(variants, protocol, opened, workers, say, retry)
        if any(isinstance(worker, SameProcess) for worker in comparison.workers):
            comparison.state["cautions"] = [SAME_PROCESS]
        return comparison.run_all()


class _Interrupted(Exception):
    def __init__(self, exit_code: int):
        self.exit_code = exit_code


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
        self.planned = len(variants) * (self.least_pilots + trials + protocol.seeds)
        self.began, self.finished = time.monotonic(), 0

    def forget_failures(self) -> None:
        """Remove failed runs from the record, so that they run again. Failed trials stay if a run with a compared seed
        exists, because repeated trials could change the chosen learning rate.
        """
        chosen = any("seed" in entry for entry in self.runs.values())
        for run in [run for run, entry in self.runs.items() if entry["status"] == "failed"]:
            if not (chosen and "trial" in self.runs[run]):
                del self.runs[run]

    def run_all(self) -> dict[str, Any]:
        try:
            costs = self.pilots()
            steps = steps_of_variants(self.variants, costs, self.protocol.equal)
            self.state["budgets"] = {label: _planned(steps[label], costs[label]) for label in steps}
            tuned = [self.tuned(variant) for variant in self.variants] if self.trials(steps) else self.variants
            self.seeds(tuned, steps)
        except _Interrupted as stopped:
            return self.write_state("interrupted", stopped.exit_code)
        except ThriftyError as error:
            self.state["error"] = str(error)
            self.write_state("stopped", error.exit_code)
            raise
        except BaseException as ended:
            self.write_state("interrupted", getattr(ended, "code", 1))
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

    def pilots(self) -> dict[str, StepCost]:
        """Run all pilots; return the cost of a step of each variant. Raises UsageError if a pilot fails, and
        InfeasibleError if step times of pilots do not agree.
        """
        steps, costs_by_arm = self.pilot_steps(0.0), {variant.label: [] for variant in self.variants}
        turn, wanted = 0, self.least_pilots
        while turn < wanted or self.apart(costs_by_arm):
            if turn == MOST_PILOTS:
                raise InfeasibleError(self.apart(costs_by_arm), fix="end other processes; or --equal-budget flops")
            for variant in _turned(self.variants, turn):
                costs_by_arm[variant.label].append(self.pilot(variant, turn, steps))
            self.check_judged(f"pilot-{turn}")
            if not turn and self.protocol.equal == "time":
                before, steps = steps, self.pilot_steps(max(costs[0].seconds for costs in costs_by_arm.values()))
                wanted = TIMED_PILOTS + (steps != before)
            turn += 1
        return {label: mean_cost(costs[-2:]) for label, costs in costs_by_arm.items()}

    @property
    def least_pilots(self) -> int:
        return TIMED_PILOTS + 1 if self.protocol.equal == "time" else 1

    def pilot_steps(self, step_time: float) -> int:
        """Return the number of steps of a pilot, at most the steps of the baseline's budget."""
        steps = max(self.protocol.pilot, math.ceil(PILOT_SECONDS / step_time) if step_time else 0)
        return min(steps, self.variants[0].recipe.budget.steps or steps)

    def apart(self, costs_by_arm: Mapping[str, Sequence[StepCost]]) -> str:
        """Return an error message if step times of a variant's last two pilots differ too much for equal time; else an
        empty string.
        """
        for label, costs in costs_by_arm.items():
            seconds = [cost.seconds for cost in costs[-2:]]
            low, high = min(seconds), max(seconds)
            if self.protocol.equal == "time" and high > (1 + PILOTS_APART) * low:
                times = f"'{duration(low)}' and '{duration(high)}'"
                return (
                    f"{label}: a step took {times} in two pilots; equal time allows a difference of {PILOTS_APART:.0%}"
                )
        return ""

    def pilot(self, variant: Variant, turn: int, steps: int) -> StepCost:
        """Run a pilot of `steps` steps and return its step cost. Raises UsageError if the pilot fails."""
        name = f"{variant.folder}-pilot-{turn}"
        recipe = self.recipe(variant, name, steps, 0, evaluations=1)
        entry = self.run(self.workers[0], recipe, arm=variant.label, pilot=turn)
        if entry["status"] == "failed":
            fix = "correct the variant or remove it, then compare again"
            raise UsageError(f"{variant.label} fails in its pilot of {steps} steps: {entry['error']}", fix=fix)
        return step_cost(self.folder.path / name)

    def check_judged(self, kind: str) -> None:
        """Raise UsageError if the held-out data of a variant differ from the baseline's."""
        baseline, *others = (self.runs[f"{variant.folder}-{kind}"] for variant in self.variants)
        for entry in others:
            if other := differences(baseline["judged_on"], entry["judged_on"]):
                raise UsageError(
                    f"{entry['arm']} is not comparable with the baseline: {'; '.join(other)}",
                    fix="use the same data and the same tokenizer for all variants",
                )

    def trials(self, steps: Mapping[str, int]) -> bool:
        """Run all variants at all trial learning rates; return True if the protocol has trials."""
        if self.protocol.trials == 1:
            return False

        def at_rate(worker: RunLauncher, turn: int, factor: float) -> None:
            for variant in _turned(self.variants, turn):
                name = f"{variant.folder}-trial-{turn}"
                recipe = self.recipe(variant.at_rate(factor), name, steps[variant.label], TRIAL_SEED)
                self.run(worker, recipe, arm=variant.label, trial=turn, factor=factor)

        rates = enumerate(self.protocol.factors)
        run_on_workers(self.workers, [partial(at_rate, turn=turn, factor=factor) for turn, factor in rates])
        return True

    def seeds(self, variants: Sequence[Variant], steps: Mapping[str, int]) -> None:
        """Run all variants with all seeds."""

        def with_seed(worker: RunLauncher, seed: int) -> None:
            for variant in _turned(variants, seed):
                recipe = self.recipe(variant, f"{variant.folder}-seed-{seed}", steps[variant.label], seed)
                self.run(worker, recipe, arm=variant.label, seed=seed)

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
            "trials": [
                {"lr": variant.rate * entry["factor"], "held_out_loss": entry.get("held_out_loss"), "judged": value}
                for entry, value in zip(entries, judged, strict=True)
            ],
            "at_edge": best["factor"] in (self.protocol.factors[0], self.protocol.factors[-1]),
        }
        return variant.at_rate(best["factor"])

    def recipe(self, variant: Variant, name: str, steps: int, seed: int, evaluations: int = EVALUATIONS) -> Recipe:
        """Return the recipe of one run of a variant, with the baseline's evaluation settings."""
        settings = self.variants[0].recipe.evaluation
        return replace(
            variant.recipe,
            name=name,
            seed=variant.recipe.seed + seed,
            budget=Budget(steps=steps),
            evaluation=replace(settings, every=max(1, steps // evaluations), at_start=False, patience=None),
            checkpoints=replace(variant.recipe.checkpoints, keep=1, extra_steps=()),
        )

    def run(self, worker: RunLauncher, recipe: Recipe, **place: Any) -> dict[str, Any]:
        """Run a recipe to the end and return the record of the run. Raises _Interrupted if the run was stopped."""
        name = recipe.name
        if (before := self.runs.get(name)) and before["status"] in ("finished", "failed"):
            return before
        ended = worker(recipe, self.folder.path)
        entry = {"run": name, **place, **ended.as_data()}
        if entry["status"] == "interrupted":
            raise _Interrupted(ended.exit_code)
        if entry["status"] == "finished":
            entry |= read_run_result(self.folder.path / name, recipe.evaluation.judge)
            if entry["held_out_loss"] is None:
                entry |= {"status": "failed", "error": "its held-out loss is not finite"}
        with self.write_lock:
            self.runs[name] = entry
            self.finished += 1
            self.write_state("running", 0)
            self.say(self.progress(entry))
        return entry

    def progress(self, entry: Mapping[str, Any]) -> str:
        left = (time.monotonic() - self.began) / self.finished * (self.planned - len(self.runs))
        loss = entry.get("held_out_loss")
        is_finished = entry["status"] == "finished"
        result = f"held-out loss {significant(loss, 4)}" if is_finished else f"failed: {entry['error']}"
        kind = next(f"{kind} {entry[kind]}" for kind in ("pilot", "trial", "seed") if kind in entry)
        took = duration(entry["elapsed"]) + (f"; about {duration(left)} left" if left else "")
        return f"[{len(self.runs)}/{self.planned}] {entry['arm']}, {kind}: {result} ({took})"


def _planned(steps: int, cost: StepCost) -> dict[str, Any]:
    """Return a variant's planned budget in seconds, tokens and FLOPs."""
    amounts = {"seconds": steps * cost.seconds, "tokens": steps * cost.tokens, "flops": steps * cost.flops}
    return {"steps": steps, **amounts, "step": cost.as_data()}


def _turned(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """Return the variants rotated by `turn`, because machine conditions may change while the variants run."""
    first = turn % len(variants)
    return [*variants[first:], *variants[:first]]
