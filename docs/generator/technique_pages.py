"""Pages of techniques with their evidence, and the list of techniques by goal."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from generator.card_pages import card_page
from generator.documents import RESULTS, ROOT
from generator.markdown import Markdown, block, code, join, md, table, toctree
from thrifty import techniques
from thrifty.core.card import read_card
from thrifty.experiments import studies
from thrifty.experiments.evidence import Evidence, evidence_by_technique
from thrifty.interface.technique_profiles import TechniqueProfile, profile_of


def technique_pages() -> dict[str, str]:
    """Return one page per technique and one page with all of them by goal."""
    where = json.loads((RESULTS / "technique_table.json").read_text(encoding="utf-8"))
    profiles = technique_profiles()
    pages = {f"techniques/{each.name}": _technique(each, where, profiles) for each in profiles}
    groups: dict[str, list[TechniqueProfile]] = {}
    for each in profiles:
        groups.setdefault(each.name.rpartition(".")[0] or each.name, []).append(each)
    groups = dict(sorted(groups.items(), key=lambda group: goal(group[1][0].name)))
    tables = {
        name: table(("technique", "effect", "measured"), map(_technique_row, them)) for name, them in groups.items()
    }
    for name, members in groups.items():
        if name != members[0].name:
            names = [each.name for each in members]
            pages[f"techniques/{name}"] = join(f"# {goal(names[0])}", tables[name], toctree(names))
    about = (
        "Each technique is one file. Its page has the code to use it, its settings, and what was measured. The column "
        '"measured" compares with a run without the technique. "exact", "rounding" and "different" are the effect on '
        "values."
    )
    listed = [join(f"## {goal(members[0].name)}", tables[name]) for name, members in groups.items()]
    pages["techniques/index"] = join("# Techniques by goal", about, *listed, toctree(groups))
    return pages


@cache
def technique_profiles() -> Sequence[TechniqueProfile]:
    """Return the cards of all techniques with their evidence in `results/`."""
    evidence = evidence_by_technique([RESULTS])
    kinds = map(techniques.find, techniques.own_names())
    return [replace(profile_of(kind), evidence=evidence.get(kind.name, Evidence())) for kind in kinds]


def goal(name: str) -> str:
    """Return the goal of a technique: the first words of its group's docstring."""
    group = name.rpartition(".")[0]
    docstring = sys.modules[f"thrifty.techniques.{group}"].__doc__ or "" if group else "Compilation"
    return docstring.partition(":")[0].partition("\n")[0].strip(".")


def _technique_row(profile: TechniqueProfile) -> tuple[object, ...]:
    card = read_card(profile.card)
    verdicts = [f"{aspect} {verdict}" for aspect, verdict in profile.evidence.verdicts().items()]
    link = Markdown(f"[{md(card.title or profile.name)}]({profile.name}.md)")
    return link, card.effect, ", ".join([*verdicts, profile.numerics])


def _technique(profile: TechniqueProfile, where: dict[str, Any], profiles: Sequence[TechniqueProfile]) -> str:
    kind, card = techniques.find(profile.name), read_card(profile.card)
    start = card.start or profile.name.rpartition(".")[2]
    chips = [
        f'<span class="chip {word}">{aspect}: {word}</span>'
        for aspect, word in {**profile.evidence.verdicts(), "values": profile.numerics}.items()
    ]
    supported = where["techniques"].get(profile.name, {})
    same = [each for each in profiles if goal(each.name) == goal(profile.name) and each is not profile]
    links = ", ".join(f"[{md(read_card(each.card).title or each.name)}]({each.name}.md)" for each in same)
    return card_page(
        profile.name,
        profile.card,
        profile.settings,
        kind,
        join(
            "## Measured",
            "<p>" + " ".join(chips) + "</p>",
            evidence_table(profile.evidence),
            *study_figures(profile.evidence),
        ),
        join("## Where it works", table(("use", "result"), supported.items())) if supported else "",
        join("## Notes", md(profile.notes)) if profile.notes else "",
        command=join("On the command line:", block("bash", f"thrifty train … --with {start}")),
    ) + (f"\n\n## Same goal\n\n{links}\n" if links else "")


def evidence_table(evidence: Evidence) -> str:
    """Return findings, comparisons and studies of a technique as one table."""
    body: list[tuple[object, ...]] = []
    for each in evidence.findings:
        conditions = "; ".join(part for part in (each.settings, each.model, each.device) if part)
        body.append((each.aspect, each.verdict, each.text, conditions, source(each.source)))
    for one in evidence.comparisons:
        conditions = f"equal {one.equal}; {one.parameters / 1e6:.2g}M parameters, {one.steps:,} steps; {one.cpu}"
        text = f"{one.role}{' with ' + ', '.join(one.others) if one.others else ''}: {one.sentence}"
        body.append(("comparison", one.verdict, text, conditions, source(str(one.file))))
    for study in evidence.studies:
        link = Markdown(f"[{md(study.study)}](../studies/{study.study}.md)")
        outcome = f"{study.held} of {study.expected} expectations hold"
        body.append(("study", outcome, study.about, study.cpu, link))
    if not body:
        return "Nothing is measured yet. Measure it: `thrifty compare RECIPE --variant '--with NAME'`."
    return table(("aspect", "verdict", "result", "conditions", "source"), body)


def study_figures(evidence: Evidence) -> list[str]:
    """Return the first chart of each study. A technique of many studies, such as AdamW, is the subject of none."""
    if len(evidence.studies) > 3:
        return []
    plots = {each.study: studies.make(each.study).plots for each in evidence.studies}
    return [block("{raw} html", f":file: ../studies/{name}-{them[0].id}.html") for name, them in plots.items() if them]


def source(text: str) -> Markdown:
    """Return the source of a measurement: a link to the result file, or the command or test that repeats it."""
    path = text.replace(f"{ROOT}/", "")
    if (ROOT / path).is_file() and path.endswith(".json"):
        return Markdown(f"{{download}}`{Path(path).name} <../../../{path}>`")
    return code(path) if text else Markdown("")
