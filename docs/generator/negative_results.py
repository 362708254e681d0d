"""Page of negative results: findings, comparisons and expectations of studies that failed."""

import json

from generator.documents import RESULTS
from generator.markdown import Markdown, join, md, table, technique_link
from generator.technique_pages import technique_profiles
from thrifty.experiments.past_results import past_comparisons, past_studies


def negative_results() -> str:
    """Return findings and comparisons with verdict "worse" or "mixed", and expectations that do not hold."""
    findings = [
        (
            technique_link(each.name),
            one.verdict,
            f"{one.aspect}: {one.text}",
            "; ".join(filter(None, (one.settings, one.model, one.device))),
        )
        for each in technique_profiles()
        for one in each.evidence.findings
        if one.verdict in ("worse", "mixed")
    ]
    comparisons = [
        (
            technique_link(each.technique),
            each.verdict,
            f"{each.role}: {each.sentence}",
            f"equal {each.equal}; {each.cpu}",
        )
        for each in past_comparisons([RESULTS])
        if each.verdict != "better"
    ]
    failed = []
    for past in past_studies([RESULTS]):
        data = json.loads(past.file.read_bytes())
        for each in data["expectations"]:
            if each["verdict"] != "holds":
                seeds = f"{each['held']} of {each['seeds']}"
                failed.append((Markdown(f"[{md(past.study)}](studies/{past.study}.md)"), each["sentence"], seeds))
    return join(
        "# Negative results",
        "Measurements in which a technique costs more than it saves, and published claims that these studies do not "
        "reproduce. Ratios below 1 are better, unless the text says otherwise.",
        "## Claims that did not hold",
        table(("study", "expectation", "seeds for which it holds"), failed),
        "## Comparisons at an equal budget",
        "In these comparisons the variant was not better than the baseline.",
        table(("technique", "verdict", "result", "conditions"), comparisons),
        "## Findings of benchmarks",
        table(("technique", "verdict", "result", "conditions"), findings),
    )
