"""Tables of a comparison from its comparison.json."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from thrifty.reporting.comparison_charts import BASELINE, Comparison, judged_of, judged_value
from thrifty.reporting.number_format import MISSING, duration, percent, scaled, significant, whole

EMPTY = ("", MISSING, "not measurable")
"""Cells without a value."""


def tables(data: Comparison) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Return the title, note, header and rows of every table. Columns without values are omitted, and a table without
    data has no rows.
    """
    every = [_rungs(data), _used(data), _measured(data), _rates(data), _by_seed(data), _planned(data)]
    every += [_setup(data), _runs(data)]
    return [(title, note, *_filled_columns(head, rows)) for title, note, head, rows in every]


def _by_seed(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    judged = judged_of(data)
    values: dict[int, dict[str, float]] = {}
    for entry in data["runs"]:
        is_compared = "seed" in entry and entry["status"] == "finished"
        if is_compared and (value := judged_value(entry, judged)) is not None:
            values.setdefault(entry["seed"], {})[entry["variant"]] = value
    others = [label for label in data["definition"]["variants"] if label != BASELINE]
    paired = {seed: each for seed, each in sorted(values.items()) if each.keys() == {BASELINE, *others}}
    columns = {label: [each[label] for each in paired.values()] for label in (BASELINE, *others)}
    columns |= {f"{label} - {BASELINE}": [each[label] - each[BASELINE] for each in paired.values()] for label in others}
    summary = {"mean": fmean, "standard deviation": stdev} if len(paired) > 1 else {}
    rows = [[str(seed), *(f"{column[n]:.4g}" for column in columns.values())] for n, seed in enumerate(paired)]
    rows += [[name, *(f"{of(column):.4g}" for column in columns.values())] for name, of in summary.items()]
    note = "Seeds for which all variants have finished. The verdict is based on these differences."
    return f"Held-out {judged} by seed", note, ["seed", *columns], rows


def _filled_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    filled = [column for column in range(len(head)) if any(row[column] not in EMPTY for row in rows)]
    return [head[column] for column in filled], [[row[column] for column in filled] for row in rows]


def _setup(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    recipes = data["definition"]["variants"]
    plain, finished = recipes[BASELINE], [entry for entry in data["runs"] if entry["status"] == "finished"]
    model, settings = plain.get("model", {}), plain.get("data", {})
    facts = {
        "model": model.get("build") or model.get("folder") or model.get("preset"),
        "parameters": f"{finished[0]['parameters']:,}" if finished else "",
        "data": settings.get("source"),
        "tokens per example": settings.get("length") if unit_of(data) == "tokens" else None,
        "examples per step": settings.get("batch"),
        "techniques": ", ".join(_technique_names(plain.get("techniques", {}))),
        "held-out examples": plain.get("evaluation", {}).get("examples"),
        "unit of the loss": _unit_of_loss(finished[0]["judged_on"]) if finished else "",
    }
    rows = [["baseline", f"{name} = {value}"] for name, value in facts.items() if value]
    baseline = _values(plain)
    for label, recipe in recipes.items():
        removed = data["changes"].get(label, {}).get("removed", [])
        rows += [[label, f"without {name}"] for name in removed]
        rows += [
            [label, f"{path.removeprefix('techniques.')} = {value}"]
            for path, value in _values(recipe).items()
            if baseline.get(path) != value
        ]
    rows += [[label, f"selected learning rate = {sweep['lr']:.3g}"] for label, sweep in data.get("rates", {}).items()]
    return "Setup", "Settings of the baseline, and what each variant changes.", ["variant", "setting"], rows


def _technique_names(table: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the dotted names of the techniques in a recipe's tables."""
    is_technique = any(not isinstance(value, Mapping) for value in table.values()) or (path and not table)
    if is_technique:
        return [path.removesuffix(".")]
    return [name for key, value in table.items() for name in _technique_names(value, f"{path}{key}.")]


def _values(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted path."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= _values(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return values


def _unit_of_loss(facts: Mapping[str, Any]) -> str:
    return facts.get("loss_in") or f"nats per {facts.get('unit', 'tokens').removesuffix('s')}"


def _rungs(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    variants = data.get("outcome", {}).get("variants", {})
    head = [
        "variant",
        "FLOPs per step",
        "FLOP/s",
        "of peak",
        "step time",
        "time to the baseline's loss",
        "peak memory above the process",
        "energy",
    ]
    rows = []
    for label, variant in variants.items():
        per_step = variant["flops"] / variant["steps"] if variant["flops"] is not None else None
        cells = [
            (scaled(per_step), _of(variants, label, lambda one: one["flops"] / one["steps"])),
            (scaled(variant["flop_rate"]), _of(variants, label, lambda one: one["flop_rate"])),
            (percent(variant["share_of_peak"]), ""),
            (duration(variant["step_time"]), _of(variants, label, lambda one: one["step_time"])),
            (time_to_quality(variant), ""),
            (scaled(variant["peak_memory"], "B"), _of(variants, label, lambda one: one["peak_memory"])),
            ("not measurable" if variant["joules"] is None else scaled(variant["joules"], "J"), ""),
        ]
        rows.append([label, *(f"{value} {ratio}".strip() for value, ratio in cells)])
    note = (
        "Components of a gain: FLOPs per step, FLOP rate of the machine, step time, and the time to the baseline's "
        "final loss. Values in brackets are ratios to the baseline."
    )
    return "FLOPs, speed and time to quality", note, head, rows


def _of(variants: Mapping[str, Any], label: str, value: Any) -> str:
    """Return the ratio to the baseline in brackets; empty if the variant's or the baseline's value is missing."""
    if label == BASELINE:
        return ""
    try:
        return f"(× {significant(value(variants[label]) / value(variants[BASELINE]))})"
    except (TypeError, ZeroDivisionError):
        return ""


def time_to_quality(variant: Mapping[str, Any]) -> str:
    time = variant.get("time_to_quality")
    if not time:
        return MISSING
    if time["mean"] is None:
        return f"reached in 0 of {time['pairs']} pairs"
    interval = f" ({significant(time['low'])} to {significant(time['high'])})" if time["low"] is not None else ""
    reached = (
        "" if time["reached"] == time["pairs"] else f", of the {time['reached']} of {time['pairs']} that reached it"
    )
    return f"× {significant(time['mean'])}{interval}{reached}"


def _used(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    variants, budgets = data.get("outcome", {}).get("variants", {}), data.get("budgets", {})
    head = ["variant", "held-out loss", "steps", unit_of(data), "FLOPs", "seconds", "planned", "with starts", "elapsed"]
    rows = [
        [
            label,
            significant(variant["held_out_loss"], 4),
            whole(variant["steps"]),
            scaled(variant["tokens"]),
            scaled(variant["flops"]),
            duration(variant["seconds"]),
            duration(budgets[label]["seconds"]),
            duration(variant["seconds_with_starts"]),
            duration(variant["elapsed"]),
        ]
        for label, variant in variants.items()
    ]
    note = (
        'Means over seeds of the resources that each variant used. Seconds are the sum of step times. "With starts" '
        "also includes compilation. Elapsed time is from start to end, with evaluations and saving."
    )
    return "Resources used", note, head, rows


def unit_of(data: Comparison) -> str:
    """Return the unit of examples, such as tokens or images."""
    return next((entry["judged_on"].get("unit", "tokens") for entry in data["runs"] if "judged_on" in entry), "tokens")


def _measured(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    variants = data.get("outcome", {}).get("variants", {})
    rows = [
        [label, name, significant(variant["measured"].get(name)), _difference(variant, name)]
        for label, variant in variants.items()
        for name in variant["measured"]
    ]
    head = ["variant", "metric", "mean", "minus baseline"]
    judged = judged_of(data)
    note = "No verdict is based on these metrics." if judged == "loss" else f"The verdict is based on {judged} only."
    return "Additional metrics", note, head, rows


def _difference(variant: Mapping[str, Any], name: str) -> str:
    gap = variant.get("measured_differences", {}).get(name)
    if not gap:
        return MISSING
    ends = f" ({significant(gap['low'])} to {significant(gap['high'])})" if gap["low"] is not None else ""
    return f"{significant(gap['mean'])}{ends}"


def _rates(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    rows = [
        [
            label,
            ", ".join(
                f"{trial['lr']:.3g}: {significant(trial.get('judged', trial['held_out_loss']), 4)}"
                for trial in sweep["trials"]
            ),
            f"{sweep['lr']:.3g}",
            "at the edge" if sweep["at_edge"] else "inside",
        ]
        for label, sweep in data.get("rates", {}).items()
    ]
    note = "Each variant has the same number of trials, at its full budget, on a seed outside the comparison."
    return (
        "Learning rates tried",
        note,
        ["variant", f"rate: held-out {judged_of(data)}", "selected", "position in the grid"],
        rows,
    )


def _planned(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    rows = [
        [
            label,
            whole(each["steps"]),
            duration(each["step"]["seconds"]),
            whole(each["step"]["tokens"]),
            scaled(each["step"]["flops"]),
        ]
        for label, each in data.get("budgets", {}).items()
    ]
    note = (
        "Counted before the runs. At equal time, step times are from short pilot runs, and each run adapts its number "
        "of steps to the machine. Schedules decay until the end of each run."
    )
    return "Budgets", note, ["variant", "steps", "step time", f"{unit_of(data)} per step", "FLOPs per step"], rows


def _runs(data: Comparison) -> tuple[str, str, list[str], list[list[str]]]:
    rows = [
        [
            entry["run"],
            entry["variant"],
            str(entry.get("seed", "")),
            f"{entry['lr']:.3g}" if "lr" in entry else "",
            entry["status"],
            significant(entry.get("held_out_loss"), 4),
            duration(entry.get("seconds")),
            entry.get("error", ""),
        ]
        for entry in data["runs"]
    ]
    failed = sum(entry["status"] == "failed" for entry in data["runs"])
    head = ["run", "variant", "seed", "learning rate", "status", "held-out loss", "seconds in steps", "error"]
    return "All runs", f"{len(rows)} runs, {failed} of them failed.", head, rows
