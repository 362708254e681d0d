"""Page of a comparison from its comparison.json: one self-contained HTML file with inline SVG charts and without
scripts.
"""

import json
from collections import defaultdict
from pathlib import Path

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import for_reader
from thrifty.core.old_names import rename_comparison
from thrifty.core.secret_redaction import redact
from thrifty.reporting.comparison_charts import Comparison, charts, judged_of
from thrifty.reporting.comparison_tables import tables, time_to_quality, unit_of
from thrifty.reporting.number_format import MISSING, duration, percent, significant
from thrifty.reporting.result_page import BAD, GOOD, PHONE, WIDE, PageChart, PageVerdict, ResultPage
from thrifty.reporting.run_tables import TextTable
from thrifty.reporting.saved_chart import page_svg

UNEQUAL = 0.03
"""Relative deviation from the equal budget above which page and verdict show a caution."""
DISTURBED = 1.5
"""Ratio of the step times of a variant's runs above which the page shows a caution."""
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
    equal = {"flops": "counted FLOPs", "time": "seconds in training steps", "tokens": unit_of(data)}.get(
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
    ratios, time = variant.get("ratios", {}), time_to_quality(variant)
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
    equal = {"flops": "FLOPs", "time": "seconds", "tokens": unit_of(data)}.get(protocol["equal"], protocol["equal"])
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
    warnings += _disturbed(data)
    if restarted := sorted(data.get("restarts", {})):
        warnings.append(f"{len(restarted)} runs were interrupted and resumed: {', '.join(restarted)}")
    machines = sorted({f"{entry['cpu']}, {entry['device']}" for entry in data["runs"] if "cpu" in entry})
    if len(machines) > 1:
        warnings.append(f"runs used different machines, so times are mixed: {'; '.join(machines)}")
    if edge := [label for label, sweep in data.get("rates", {}).items() if sweep["at_edge"]]:
        wider = for_reader("--rate-trials 5")
        where = f"at the edge of the grid for: {', '.join(edge)}"
        warnings.append(f"the best learning rate was {where}; a wider search may find a better rate: {wider}")
    return warnings


def _disturbed(data: Comparison) -> list[str]:
    """Return a caution on each variant whose step time differs much between its runs."""
    depends, times = "", defaultdict(list)
    if data["definition"]["protocol"]["equal"] == "time":
        depends = ". The verdict depends on them: compare on a quiet machine, or with --equal-budget steps"
    for entry in data["runs"]:
        if entry["status"] == "finished" and "seed" in entry and entry.get("step_time"):
            times[entry["variant"]].append(entry["step_time"])
    return [
        f"a step of {label} took {duration(min(each))} in one run and {duration(max(each))} in another, probably "
        f"because of other programs; do not compare times{depends}"
        for label, each in times.items()
        if max(each) > DISTURBED * min(each)
    ]


def _nothing_learned(data: Comparison) -> list[str]:
    """Return a caution if variants are not better than the frequencies of tokens or labels."""
    losses = {name: each["held_out_loss"] for name, each in data.get("outcome", {}).get("variants", {}).items()}
    facts = next((entry["judged_on"] for entry in data["runs"] if "judged_on" in entry), {})
    for fact, words in (("unigram_entropy", "token frequencies"), ("label_entropy", "label frequencies")):
        entropy = facts.get(fact)
        above = [name for name, loss in losses.items() if entropy is not None and loss is not None and loss >= entropy]
        if above:
            who = "no variant" if len(above) == len(losses) else f"not every variant ({', '.join(above)})"
            why = f"the held-out loss is above that of the {words} alone, {significant(entropy)}"
            return [f"{who} has learned enough: {why}; longer runs may give another verdict"]
    return []
