"""Page of a comparison from its comparison.json: one self-contained HTML file with inline SVG charts and without
scripts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import for_reader
from thrifty.core.old_names import rename_comparison
from thrifty.core.secret_redaction import redact
from thrifty.reporting.comparison_charts import BASELINE, Comparison, charts, judged_of
from thrifty.reporting.number_format import MISSING, duration, percent, scaled, significant, whole
from thrifty.reporting.result_page import BAD, GOOD, PHONE, WIDE, PageChart, PageVerdict, ResultPage
from thrifty.reporting.run_tables import TextTable
from thrifty.reporting.saved_chart import page_svg

UNEQUAL = 0.03
"""Relative deviation from the equal budget above which page and verdict show a caution."""
OUTCOMES = {"better": GOOD, "worse": BAD}
HEADLINES = {
    "better": "{} is better than the baseline",
    "worse": "{} is worse than the baseline",
    "no difference": "{}: no difference from the baseline was found",
    "undecided": "{}: undecided",
}
RULE = (
    "A variant is better or worse if two conditions hold. A permutation test of the paired differences passes at 3 %, "
    "and their 95 % bootstrap interval excludes zero. Both levels are corrected for the number of variants. If a "
    "variant did not use exactly the baseline's budget, the interval is widened by the relative budget difference "
    "times the slope of the variant's loss. This amount is also the null hypothesis of the test. If the budget "
    "difference could explain a result, the verdict is undecided. The loss is the loss of the plain objective on "
    "held-out data at the end of each run."
)
EMPTY = ("", MISSING, "not measurable")
"""Cells without a value."""


def write_comparison_page(folder: Path) -> Path:
    """Write report.html next to comparison.json and return its path. Works also while the comparison runs."""
    data = rename_comparison(redact(json.loads((folder / "comparison.json").read_text(encoding="utf-8"))))
    page = folder / "report.html"
    AtomicFiles().swap_text(page, render(data))
    return page


def render(data: Comparison) -> str:
    """Return the page as text. The page is deterministic."""
    devices = sorted({entry["device"] for entry in data["runs"] if "device" in entry})
    drawn = [{title: chart for title, _, chart in charts(data, width)} for width in (WIDE, PHONE)]
    return ResultPage(
        kind="comparison",
        name=data["name"],
        status=data["status"],
        error=data.get("error", ""),
        about=about(data),
        verdicts=[
            PageVerdict(
                HEADLINES[word].format(label) + small,
                _as_sentence(sentence.partition(": ")[2]),
                gains(data, label),
                "" if small else OUTCOMES.get(word, ""),
            )
            for label, word, sentence in verdicts(data)
            for small in [_small_effect(data, label)]
        ],
        rule=RULE,
        pending="The verdict appears after all pairs have finished, because interim verdicts would make false findings "
        "likely.",
        cautions=[_as_sentence(caution) for caution in cautions(data)],
        charts=[
            PageChart(title, caption, *(page_svg(each[title].to_dict()) for each in drawn))
            for title, caption, _ in charts(data)
        ],
        folded=[TextTable(title, head, rows, note=note) for title, note, head, rows in tables(data) if rows],
        facts={**data["environment"], "device": ", ".join(devices)},
        spent=f"{duration(sum(entry.get('elapsed', 0) for entry in data['runs']))} in total.",
        source="All values are in comparison.json in the same folder; each run has its own folder.",
    ).render()


def about(data: Comparison) -> str:
    """Return a sentence that describes the comparison."""
    protocol, variants = data["definition"]["protocol"], len(data["definition"]["variants"]) - 1
    equal = {"flops": "counted FLOPs", "time": "seconds in training steps", "tokens": _unit(data)}.get(
        protocol["equal"], protocol["equal"]
    )
    tried = (
        f"each at the best of {protocol['trials']} learning rates"
        if protocol["trials"] > 1
        else "learning rates not tuned"
    )
    others = "one variant" if variants == 1 else f"{variants} variants"
    judged = "" if judged_of(data) == "loss" else f", compared by held-out {judged_of(data)}"
    seeds = "1 paired seed" if protocol["seeds"] == 1 else f"{protocol['seeds']} paired seeds"
    return f"A baseline and {others} at equal {equal}, {seeds}, {tried}{judged}."


def verdicts(data: Comparison) -> list[tuple[str, str, str]]:
    """Return the label, verdict and sentence of each variant."""
    outcomes = data.get("outcome", {}).get("variants", {})
    return [
        (label, variant["verdict"]["verdict"], variant["verdict"]["sentence"])
        for label, variant in outcomes.items()
        if "verdict" in variant
    ]


def _small_effect(data: Comparison, label: str) -> str:
    """Return the end of a headline for a difference below the smallest relevant effect; otherwise ""."""
    verdict, effect = data["outcome"]["variants"][label]["verdict"], data["definition"]["protocol"]["effect"]
    is_small = verdict["verdict"] in OUTCOMES and abs(verdict.get("relative") or effect) < effect
    return f", by less than {percent(effect)}" if is_small else ""


def gains(data: Comparison, label: str) -> str:
    """Return a sentence on a variant's step time, peak memory, and time to the final loss of the baseline. Return "" if
    all three are unknown."""
    variant = data["outcome"]["variants"][label]
    ratios, time = variant.get("ratios", {}), _time_to_quality(variant)
    known = [f"time to the baseline's loss {time}"] if time != MISSING else []
    known += [
        f"{words} × {significant(ratios[name])}"
        for words, name in (("step time", "step_time"), ("peak memory", "peak_memory"))
        if ratios.get(name)
    ]
    return _as_sentence("; ".join(known))


def _as_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def cautions(data: Comparison) -> list[str]:
    """Return cautions that restrict the meaning of the verdicts."""
    variants, protocol = data.get("outcome", {}).get("variants", {}), data["definition"]["protocol"]
    equal = {"flops": "FLOPs", "time": "seconds", "tokens": _unit(data)}.get(protocol["equal"], protocol["equal"])
    warnings = [*data.get("cautions", []), *_nothing_learned(data)]
    if protocol["trials"] == 1:
        warnings.append("learning rates are not tuned, which favors the variant whose rate fits best")
    warnings += [
        f"{label} used {significant(variant['used'])} times the {equal} of the baseline, although the budget was equal"
        for label, variant in variants.items()
        if variant.get("used") and abs(variant["used"] - 1) > UNEQUAL
    ]
    warnings += [
        f"the FLOPs of {label} change over its run; only the FLOPs of its last steps are counted"
        for label, each in data.get("budgets", {}).items()
        if each["step"]["flops_vary"]
    ]
    machines = sorted({f"{entry['cpu']}, {entry['device']}" for entry in data["runs"] if "cpu" in entry})
    if len(machines) > 1:
        warnings.append(f"runs used different machines, so times are mixed: {'; '.join(machines)}")
    if edge := [label for label, sweep in data.get("rates", {}).items() if sweep["at_edge"]]:
        wider = for_reader("--rate-trials 5")
        where = f"at the edge of the grid for: {', '.join(edge)}"
        warnings.append(f"the best learning rate was {where}; a wider search may find a better rate: {wider}")
    return warnings


def _nothing_learned(data: Comparison) -> list[str]:
    """Return a caution if no variant is better than the frequencies of tokens or labels."""
    losses = [each["held_out_loss"] for each in data.get("outcome", {}).get("variants", {}).values()]
    facts = next((entry["judged_on"] for entry in data["runs"] if "judged_on" in entry), {})
    for fact, words in (("unigram_entropy", "token frequencies"), ("label_entropy", "label frequencies")):
        entropy = facts.get(fact)
        if entropy is not None and losses and None not in losses and min(losses) >= entropy:
            why = f"every held-out loss is above that of the {words} alone, {significant(entropy)}"
            return [f"no variant has learned enough: {why}; longer runs may give another verdict"]
    return []


def tables(data: Comparison) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Return the title, note, header and rows of every table. Columns without values are omitted, and a table without
    data has no rows.
    """
    every = [_rungs(data), _used(data), _measured(data), _rates(data), _planned(data), _setup(data), _runs(data)]
    return [(title, note, *_filled_columns(head, rows)) for title, note, head, rows in every]


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
        "tokens per example": settings.get("length") if _unit(data) == "tokens" else None,
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
            (_time_to_quality(variant), ""),
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


def _time_to_quality(variant: Mapping[str, Any]) -> str:
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
    head = ["variant", "held-out loss", "steps", _unit(data), "FLOPs", "seconds", "planned", "with starts", "elapsed"]
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


def _unit(data: Comparison) -> str:
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
    return "Budgets", note, ["variant", "steps", "step time", f"{_unit(data)} per step", "FLOPs per step"], rows


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
