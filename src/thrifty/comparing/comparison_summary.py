"""Summary of a comparison: values of each run, means of each variant, and verdicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from thrifty.comparing.comparison_protocol import ComparisonProtocol
from thrifty.comparing.equal_budgets import JUDGED_ON
from thrifty.comparing.loss_curves import seconds_to_loss, slope_at_end
from thrifty.comparing.paired_statistics import interval
from thrifty.comparing.saved_comparison import BASELINE
from thrifty.comparing.variant_verdict import judge
from thrifty.core.recipe import EvaluationSettings
from thrifty.training.run_folder import RunFolder
from thrifty.training.time_budget import ONCE, steady

MEANS = ("held_out_loss", "steps", "tokens", "flops", "seconds", "step_time", "flop_rate", "share_of_peak")
MEANS += ("peak_memory", "joules", "elapsed", "seconds_with_starts")
RATIOS = ("flops", "seconds", "step_time", "flop_rate", "peak_memory", "joules", "tokens", "steps")
Entry = Mapping[str, Any]
"""A run in comparison.json."""


def read_run_result(folder: Path, judged: str = "loss", restarts: int = 0) -> dict[str, Any]:
    """Return the summary of a finished run, with the curves of the held-out loss and of the metric `judged`.

    `seconds` is the sum of step times after rare slow steps are shortened. `seconds_with_starts` includes compilation
    in the first steps, which are slow after each of `restarts` too. FLOPs are the FLOPs of one counted step times the
    number of steps.
    """
    run = RunFolder(folder)
    summary, explanation = run.read_json("summary"), run.read_json("explanation")
    machine = run.read_json("environment")
    records = run.read_records()
    steps = [record for record in records if record["kind"] == "step"]
    times = steady([step["step_seconds"] for step in steps], ONCE * (1 + restarts))
    at = dict(zip((step["step"] for step in steps), accumulate(times), strict=True))
    evaluations = [record for record in records if record["kind"] == "evaluation" and record["step"] in at]
    measures = {"curve": "loss"} | ({} if judged == "loss" else {"judged_curve": judged})
    curves = {
        name: [[record["step"], at[record["step"]], record[measure]] for record in evaluations]
        for name, measure in measures.items()
    }
    flops, seconds = explanation["footprint"]["flops"] * len(steps), sum(times)
    return {
        "held_out_loss": summary["held_out_loss"],
        "measured": summary.get("held_out", {}),
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "flops": flops,
        "seconds": seconds,
        "seconds_with_starts": summary["seconds"],
        "step_time": seconds / len(steps),
        "flop_rate": flops / seconds,
        "share_of_peak": flops / seconds / summary["peak_flops_per_second"],
        "peak_memory": summary["peak_memory"],
        "parameters": explanation["parameters"],
        "judged_on": {name: summary[name] for name in JUDGED_ON if name in summary},
        "device": machine["device"],
        "cpu": machine["cpu"],
        **curves,
    }


def made_steps(folder: Path) -> int:
    """Return the number of steps that a run has made; 0 if it has no folder."""
    return sum(record["kind"] == "step" for record in RunFolder(folder).read_records())


def summarize_comparison(
    runs: Iterable[Entry],
    labels: Sequence[str],
    protocol: ComparisonProtocol,
    settings: EvaluationSettings | None = None,
) -> dict[str, Any]:
    """Return the summary of a comparison in which each planned run has finished or failed.

    "variants" has the means of each variant, and for all but the baseline also ratios to the baseline and a "verdict".
    "used" is the variant's spent budget divided by the baseline's, both in the quantity `protocol.equal`.
    """
    settings = settings or EvaluationSettings()
    by_place = {(entry["variant"], entry["seed"]): entry for entry in runs}
    entries = {label: [by_place[label, seed] for seed in range(protocol.seeds)] for label in labels}
    variants: dict[str, dict[str, Any]] = {}
    for label in labels:
        variants[label] = _means(entries[label])
        if label == BASELINE:
            continue
        judged = [[_judged(entry, settings.judge) for entry in entries[one]] for one in (BASELINE, label)]
        ratios = {name: _ratio(variants[label][name], variants[BASELINE][name]) for name in RATIOS}
        curves = [entry["curve"] for entry in entries[label] if _loss(entry) is not None]
        # unknown how a metric other than the loss changes with the budget
        slope = (_mean([slope_at_end(each) for each in curves]) or 0.0) if settings.judge == "loss" else 0.0
        used = ratios["seconds" if protocol.equal == "time" else protocol.equal]
        verdict = judge(
            *judged,
            variants=len(labels) - 1,
            effect=protocol.effect,
            used=used,
            slope=slope,
            judged=settings.judge,
            is_lower_better=settings.is_lower_better,
        )
        variants[label] |= {
            "verdict": asdict(verdict),
            "ratios": ratios,
            "used": used,
            "time_to_quality": time_to_quality(entries[BASELINE], entries[label]),
            "measured_differences": _measured_differences(entries[BASELINE], entries[label], verdict.confidence),
        }
    _use_one_peak(entries, variants)
    return {"variants": variants}


def _use_one_peak(entries: Mapping[str, Sequence[Entry]], variants: Mapping[str, dict[str, Any]]) -> None:
    """Set the share of the peak of each variant by the highest peak that a run measured. Each run measures the peak for
    itself, and other processes may lower it."""
    every = [entry for group in entries.values() for entry in group if entry.get("share_of_peak")]
    peak = max((entry["flop_rate"] / entry["share_of_peak"] for entry in every), default=None)
    for variant in variants.values():
        if peak is not None and variant["share_of_peak"] is not None:
            variant["share_of_peak"] = variant["flop_rate"] / peak


def time_to_quality(baseline: Sequence[Entry], variant: Sequence[Entry]) -> dict[str, Any]:
    """Return the time to the baseline's final loss: the variant's time divided by the baseline's. "reached" is the
    number of pairs in which the variant reached this loss. The mean and its interval include only these pairs.
    """
    ratios = []
    pairs = _finished(baseline, variant)
    for first, second in pairs:
        quality = first["held_out_loss"]
        mine, its = seconds_to_loss(second["curve"], quality), seconds_to_loss(first["curve"], quality)
        if mine is not None and its:
            ratios.append(mine / its)
    low, high = interval(ratios)
    mean = fmean(ratios) if ratios else None
    return {"pairs": len(pairs), "reached": len(ratios), "mean": mean, "low": low, "high": high}


def _finished(baseline: Sequence[Entry], variant: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    return [pair for pair in zip(baseline, variant, strict=True) if None not in map(_loss, pair)]


def _loss(entry: Entry) -> float | None:
    return entry["held_out_loss"] if entry["status"] == "finished" else None


def _judged(entry: Entry, name: str) -> float | None:
    return _loss(entry) if name == "loss" or _loss(entry) is None else entry["measured"].get(name)


def _means(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return means over the seeds whose runs finished. A mean is None if one of these runs lacks the value."""
    done = [entry for entry in entries if entry["status"] == "finished"]
    means = {name: _mean([entry.get(name) for entry in done]) for name in MEANS}
    names = {name for entry in done for name in entry["measured"]}
    measured = {name: _mean([entry["measured"].get(name) for entry in done]) for name in sorted(names)}
    return {"finished": len(done), "failed": len(entries) - len(done), **means, "measured": measured}


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else fmean(values)  # type: ignore[arg-type]


def _measured_differences(baseline: Sequence[Entry], variant: Sequence[Entry], confidence: float) -> dict[str, Any]:
    """Return mean differences of all metrics in `measured`, with confidence intervals, over pairs in which both runs
    finished. A metric is omitted if one of these runs lacks it.
    """
    pairs = [(first["measured"], second["measured"]) for first, second in _finished(baseline, variant)]
    intervals = {}
    for name in pairs[0][0] if pairs else ():
        if any(one.get(name) is None for pair in pairs for one in pair):
            continue
        differences = [second[name] - first[name] for first, second in pairs]
        low, high = interval(differences, confidence)
        intervals[name] = {"mean": fmean(differences), "low": low, "high": high}
    return intervals


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
