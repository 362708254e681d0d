"""Generated pages of the documentation: techniques, studies, measurements, commands, Python names, recipe.

Each page is made from what the package and `results/` contain. A new technique, study, command or finding therefore
appears in the documentation without an edit here. `write_pages` writes Markdown (MyST) into `docs/generated/`.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import thrifty
from thrifty import techniques
from thrifty.cli.main import thrifty as command_line
from thrifty.cli.verb_list import TASKS
from thrifty.core import errors, recipe
from thrifty.core.card import SECTIONS, read_card
from thrifty.core.mesh import Mesh
from thrifty.core.technique import Technique
from thrifty.experiments import studies
from thrifty.experiments.evidence import Evidence, evidence_by_technique
from thrifty.experiments.past_results import past_comparisons, past_studies
from thrifty.experiments.study import StudyPlot
from thrifty.experiments.study_charts import SERIES, caption, chart
from thrifty.experiments.study_result import StudyCell, StudyResult, read_result
from thrifty.experiments.study_table import measured_on, rows, spread
from thrifty.interface.technique_profiles import TechniqueProfile, profile_of, settings_of
from thrifty.models.families import FAMILIES
from thrifty.models.model_presets import PRESETS
from thrifty.objectives import OBJECTIVES
from thrifty.reporting.chart_renderer import render_svg
from thrifty.reporting.color_theme import DARK, LIGHT, chart_look, css_variable
from thrifty.simulators.accelerator.accelerator_file import machine_names

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DARK_SERIES = ["#56b4e9", "#f0884a", "#3cc79e", "#d98bbd", "#d6b73f", "#9ed6f5", "#b9c0c7", "#e69f00"]
"""Colors of `study_charts.SERIES` on a dark page."""
KEPT_SUFFIXES = (".css", ".html", ".json")
"""Suffixes of generated files that are not Markdown: the colors, charts and data of studies."""
DOCUMENTS = {
    "design": "DESIGN.md",
    "contributing": "CONTRIBUTING.md",
    "studies_summary": "results/studies.md",
    "memory_counting": "results/memory_counting.md",
    "cpu_steps": "results/cpu_steps.md",
    "technique_table": "results/technique_table.md",
    "results": "results/README.md",
}
"""Documents of the repository that are pages too: name of the page and file."""


def write_pages(folder: Path) -> None:
    """Write all generated pages into a folder. Unchanged files keep their times, so that Sphinx skips them."""
    pages = {
        **technique_pages(),
        **card_pages(),
        **study_pages(),
        "negative_results": negative_results(),
        "commands": commands(),
        "python": python_names(),
        "recipe": recipe_schema(),
        "exit_codes": exit_codes(),
        "examples": examples(),
        **{name: document(file) for name, file in DOCUMENTS.items()},
        "theme.css": theme_css(),
    }
    files = {
        folder / (name if Path(name).suffix in KEPT_SUFFIXES else f"{name}.md"): text for name, text in pages.items()
    }
    for file in folder.rglob("*.*"):
        if file not in files:
            file.unlink()
    for file, text in files.items():
        text = text.rstrip() + "\n"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


RECIPE_TABLES = {
    "model": recipe.ModelSettings,
    "data": recipe.DataSettings,
    "data.augment": recipe.AugmentationSettings,
    "objective": recipe.ObjectiveSettings,
    "budget": recipe.Budget,
    "evaluation": recipe.EvaluationSettings,
    "checkpoints": recipe.CheckpointSettings,
    "mesh": Mesh,
}
"""Tables of a recipe file, with the class of each."""


# Markdown


def md(text: object, cell: bool = False) -> str:
    """Return plain text with code in backticks as Markdown; `cell` for a cell of a table."""
    parts = re.split(r"(`[^`]+`)", " ".join(str(text).split()) if cell else str(text))
    escaped = [part if part[:1] == "`" else re.sub(r"([\\*_<>\[\]#|$~])", r"\\\1", part) for part in parts]
    return "".join(part.replace("|", "\\|") if cell and part[:1] == "`" else part for part in escaped)


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return a table; cells that are already Markdown are passed as `Markdown`."""
    rule = [Markdown("---")] * len(head)
    lines = [[each if isinstance(each, Markdown) else md(each, True) for each in line] for line in (head, rule, *body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Markdown(str):
    """Text that is Markdown and is not escaped again."""


def code(text: object) -> Markdown:
    return Markdown(f"`{str(text).replace('|', chr(92) + '|')}`")


def block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def toctree(names: Iterable[str], **options: str) -> str:
    lines = [f":{key}: {value}".rstrip() for key, value in {"hidden": "", **options}.items()]
    return block("{toctree}", "\n".join([*lines, "", *names]))


def join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


# cards


def card_page(
    name: str,
    text: str,
    settings: Sequence[dict[str, Any]],
    kind: type | None,
    *more: str,
    command: str = "",
    label: str = "",
) -> str:
    """Return the page of a card: effect, use, sections, `more` and settings.

    `command` is a command line. `label` is the target of links, `[](#label)`; the default is the name.
    """
    card = read_card(text)
    heads = [head for head in SECTIONS if head in card.sections and head not in ("Use", "Paper")]
    sections = [f"**{head}.** {md(card.sections[head])}" for head in heads]
    return join(
        f"({label or name})=",
        f"# {md(card.title or name)}",
        f"`{name}` · {md(card.paper)}" if card.title else f"`{name}`",
        md(card.effect[:1].upper() + card.effect[1:]),
        block("python", card.sections["Use"]) if "Use" in card.sections else "",
        command,
        *sections,
        *more,
        join("## Settings", settings_table(settings, attribute_texts(kind) if kind else {})),
        join("## Paper", md(card.sections["Paper"])) if "Paper" in card.sections else "",
    )


def settings_table(settings: Sequence[dict[str, Any]], texts: dict[str, str]) -> str:
    if not settings:
        return "This entry has no settings."
    defaults = [(each, each["default"]) for each in settings]
    if not any(texts.get(each["name"]) for each in settings):
        return table(
            ("setting", "default", "type"),
            ((code(each["name"]), code(value if value != "" else '""'), each["type"]) for each, value in defaults),
        )
    return table(
        ("setting", "default", "type", "meaning"),
        ((code(each["name"]), _default(value), each["type"], texts.get(each["name"], "")) for each, value in defaults),
    )


def _default(value: object) -> Markdown:
    return Markdown("") if value is MISSING else code(json.dumps(value) if isinstance(value, str) else value)


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the docstrings below the attributes of a class and of its bases, by attribute."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("thrifty"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for attribute, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                value = after.value if isinstance(after, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[attribute.target.id] = " ".join(value.value.split())
    return texts


@cache
def technique_profiles() -> Sequence[TechniqueProfile]:
    """Return the cards of all techniques with their evidence in `results/`."""
    evidence = evidence_by_technique([RESULTS])
    kinds = map(techniques.find, techniques.own_names())
    return [replace(profile_of(kind), evidence=evidence.get(kind.name, Evidence())) for kind in kinds]


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


def card_pages() -> dict[str, str]:
    """Return pages of objectives, accelerator designs and model families, and a page that lists each kind."""
    pages = {}
    objectives = {name: thrifty.show(name, kind="objective") for name in OBJECTIVES}
    designs = {name: thrifty.show(name, kind="design") for name in machine_names()}
    models = {style: next(name for name, shape in PRESETS.items() if shape.style == style) for style in FAMILIES}
    for name, each in objectives.items():
        pages[f"objectives/{name}"] = card_page(
            name, each.card, each.settings, OBJECTIVES[name], md(each.notes), label=f"objective-{name}"
        )
    for name, each in designs.items():
        pages[f"designs/{name}"] = card_page(
            name, each.card, each.settings, None, md(each.notes), label=f"design-{name}"
        )
    presets = thrifty.list("presets")
    for style, preset in models.items():
        sizes = [(code(name), about) for name, about in presets.items() if PRESETS[name].style == style]
        text = thrifty.show(preset, kind="preset").card
        pages[f"models/{style}"] = card_page(
            style, text, (), None, join("## Presets", table(("preset", "size"), sizes))
        )
        pages[f"models/{style}"] = pages[f"models/{style}"].replace(
            "## Settings\n\nThis entry has no settings.\n\n", ""
        )
    for kind, title in (("objectives", "Objectives"), ("designs", "Accelerator designs"), ("models", "Model families")):
        names = [name.partition("/")[2] for name in pages if name.startswith(f"{kind}/")]
        body = [(Markdown(f"[{md(name)}]({name}.md)"), _effect(kind, name)) for name in names]
        pages[f"{kind}/index"] = join(f"# {title}", table(("name", "content"), body), toctree(names))
    return pages


def _effect(kind: str, name: str) -> str:
    if kind == "models":
        return read_card(FAMILIES[name].__doc__).effect
    shown = thrifty.show(name, kind="objective" if kind == "objectives" else "design")
    return read_card(shown.card).effect


# studies


def study_pages() -> dict[str, str]:
    """Return one page per study with its charts and data file, and the index of studies."""
    pages: dict[str, str] = {}
    listed: list[tuple[object, ...]] = []
    for name in studies.names():
        file = next(iter(sorted((RESULTS / "studies" / name).glob("*.json"))), None)
        if file is None:
            listed.append((code(name), studies.make(name).about, "not measured yet"))
            continue
        result = saved_result(name, file)
        held = sum(verdict.verdict == "holds" for verdict in result.verdicts)
        pages[f"studies/{name}"] = _study(name, result)
        pages[f"studies/{name}.json"] = file.read_text(encoding="utf-8")
        pages |= {f"studies/{name}-{plot.id}.html": _figure(result, plot) for plot in result.study.plots}
        link = Markdown(f"[{md(name)}]({name}.md)")
        listed.append((link, result.study.about, f"{held} of {len(result.verdicts)}"))
    about = "Each study repeats a published experiment at small scale. Expectations were written before the runs."
    pages["studies/index"] = join(
        "# Studies",
        about,
        table(("study", "claim", "expectations that hold"), listed),
        toctree(name.partition("/")[2] for name in pages if not Path(name).suffix),
    )
    return pages


def saved_result(name: str, file: Path) -> StudyResult:
    """Return the saved result of a study with the present definition of the study."""
    data = read_result(file)
    result = StudyResult(studies.make(name), data["environment"])
    for cell in data["cells"]:
        numbers = {key: float("inf") if value is None else value for key, value in cell["numbers"].items()}
        result.cells[cell["case"], cell["seed"]] = StudyCell(numbers, cell["seconds"])
    return result


def _study(name: str, result: StudyResult) -> str:
    study, (head, body) = result.study, rows(result)
    docstring = inspect.cleandoc(sys.modules[study.measure.__module__].__doc__ or "").partition("\n\n")[2]
    notes = [" ".join(part.split()) for part in re.split(r"\n(?=\w+ {2,})", docstring) if part.strip()]
    notes = [re.sub(r"^(\w+) ", r"**\1.** ", md(part)) for part in notes]
    verdicts = [
        (Markdown(f'<span class="chip {_chip(each.verdict)}">{each.verdict}</span>'), each.sentence,
         f"{each.held} of {each.seeds}") for each in result.verdicts
    ]  # fmt: skip
    quantities = [(code(key), each.about) for key, each in study.quantities.items() if key in head]
    figures = [block("{raw} html", f":file: {name}-{plot.id}.html") for plot in study.plots]
    return join(
        f"(study-{name})=",
        f"# {md(name.replace('_', ' ').capitalize())}",
        md(study.about),
        *notes,
        "## Claim, held or not",
        table(("verdict", "expectation", "seeds"), verdicts) if verdicts else "This study has no expectations.",
        *figures,
        "## Values",
        spread(result),
        table(head, body),
        table(("quantity", "meaning"), quantities),
        "## Data and repetition",
        f"Data: {{download}}`{name}.json`. {md(measured_on(result.environment).partition(', by ')[0])}. Repeat it:",
        block("bash", f"thrifty study {name}"),
    )


def _chip(verdict: str) -> str:
    return {"holds": "better", "does not hold": "worse"}.get(verdict, "mixed")


def _figure(result: StudyResult, plot: StudyPlot) -> str:
    """Return the chart of a study as HTML, with colors that follow the page."""
    svg = render_svg({**chart(result, plot).to_dict(), "padding": 4}, chart_look(css_variable))
    for number, shade in enumerate(SERIES):
        svg = svg.replace(shade, f"var(--series-{number})")
    title, text = escape(plot.title), escape(caption(result, plot))
    label = f'role="img" aria-label="{title}. {text}"'
    return f"<figure {label}>{svg}<figcaption><b>{title}.</b> {text}</figcaption></figure>"


def theme_css() -> str:
    """Return the colors of charts as CSS variables, for light and dark pages."""

    def colors(named: dict[str, str], series: Sequence[str]) -> str:
        values = {**named, **{f"series-{number}": shade for number, shade in enumerate(series)}}
        return "".join(f"--{name}:{value};" for name, value in values.items())

    light, dark = colors(LIGHT, SERIES), colors(DARK, DARK_SERIES)
    return (
        f"body{{{light}}}\nbody[data-theme=dark]{{{dark}}}\n"
        f"@media (prefers-color-scheme:dark){{body:not([data-theme=light]){{{dark}}}}}"
    )


# negative results


def negative_results() -> str:
    """Return findings and comparisons with verdict "worse" or "mixed", and expectations that do not hold."""
    findings = [
        (
            _link(each.name),
            one.verdict,
            f"{one.aspect}: {one.text}",
            "; ".join(filter(None, (one.settings, one.model, one.device))),
        )
        for each in technique_profiles()
        for one in each.evidence.findings
        if one.verdict in ("worse", "mixed")
    ]
    comparisons = [
        (_link(each.technique), each.verdict, f"{each.role}: {each.sentence}", f"equal {each.equal}; {each.cpu}")
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


def _link(technique: str) -> Markdown:
    return Markdown(f"[](#{technique})")


# reference


def commands() -> str:
    """Return the reference of the command line, by task."""
    parts = [
        "# Command line",
        "`thrifty VERB --help` prints the same texts. Most commands that print a result accept `--json`.",
    ]
    for task, verbs in TASKS.items():
        parts.append(f"## {task}")
        for verb, about in verbs.items():
            command = command_line.get_command(click.Context(command_line), verb)
            assert command is not None
            parts += [*_command(command, f"thrifty {verb}", 3), "Example:", block("bash", about.example)]
    return join(*parts)


def _command(command: click.Command, path: str, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"{'#' * level} {path}"
    yield block("text", command.get_usage(context).removeprefix("Usage: "))
    yield join(
        *(md(" ".join(part.split())) for part in inspect.cleandoc(command.help or "").replace("\b", "").split("\n\n"))
    )
    records = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
    options = [(code(record[0]), record[1]) for record in records if record]
    if options:
        yield table(("option", "effect"), options)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command(below, f"{path} {name}", level + 1)


def python_names() -> str:
    """Return the reference of the public Python names."""
    values = {name: getattr(thrifty, name) for name in dir(thrifty) if not name.startswith("_")}
    modules = {name: value for name, value in values.items() if inspect.ismodule(value)}
    kinds = {name: value for name, value in values.items() if inspect.isclass(value)}
    own = {name: kind for name, kind in kinds.items() if issubclass(kind, Technique) and kind is not Technique}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    parts = [
        "# Python",
        "`import thrifty as th` imports nothing else; each name is imported when it is first used.",
        "## Functions",
        *(_python(f"thrifty.{name}", value) for name, value in functions.items()),
    ]
    for name, module in modules.items():
        listed = dir(module) if name == "optim" else _functions_of(module)
        about = inspect.cleandoc(module.__doc__ or "").partition("\n")[0]
        parts += [f"## thrifty.{name}", md(about)]
        if name == "optim":
            made = ((code(f"thrifty.optim.{one}"), _link(getattr(module, one).technique.name)) for one in listed)
            parts.append(table(("optimizer", "technique"), made))
        else:
            parts += [_python(f"thrifty.{name}.{one}", getattr(module, one)) for one in listed]
    others = {name: kind for name, kind in kinds.items() if name not in own}
    parts += ["## Classes", *(_python(f"thrifty.{name}", kind) for name, kind in others.items())]
    named = ((code(f"thrifty.{name}"), _link(kind.name)) for name, kind in own.items())
    return join(*parts, "## Techniques", table(("class", "technique"), named))


def _functions_of(module: ModuleType) -> list[str]:
    """Return the public functions that a module defines."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [name for name, value in own.items() if inspect.isfunction(value) and value.__module__ == module.__name__]


def _python(name: str, value: Any) -> str:
    short = name.removeprefix("thrifty.")
    if not inspect.isclass(value):
        return join(f"### {md(short)}", block("python", signature(name, value)), docstring(value.__doc__))
    public = [
        (code(key), " ".join((inspect.getdoc(member) or "").partition("\n\n")[0].split()))
        for key, member in inspect.getmembers(value)
        if not key.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
        and not key.startswith("as_") and (member.__doc__ or "").strip()
    ]  # fmt: skip
    texts = attribute_texts(value) if is_dataclass(value) else {}
    attributes = (
        [(code(field.name), texts[field.name]) for field in fields(value) if field.name in texts] if texts else []
    )
    shown = table(("attribute or method", "content"), [*attributes, *public]) if attributes or public else ""
    return join(f"### {md(short)}", docstring(vars(value).get("__doc__")), shown)


def signature(name: str, function: Any) -> str:
    """Return the signature without types: names and defaults, one argument per line if it is long."""
    parts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts, starred = [*parts, "*"], True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred |= prefix == "*"
        default = parameter.default
        given = "" if default is parameter.empty else f"={str(default) if isinstance(default, Path) else default!r}"
        parts.append(f"{prefix}{parameter.name}{given}")
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 88 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), ")"])


def docstring(text: str | None) -> str:
    """Return a docstring as Markdown: paragraphs, arguments as a list, the example as code."""
    parts = []
    for part in re.split(r"\n\n(?=\S)", inspect.cleandoc(text or "")):
        head, _, rest = part.partition("\n")
        if head.rstrip() in ("Args:", "Attributes:"):
            found = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            named = (re.match(r"(\*{0,2}\w+): (.*)", each, re.DOTALL) for each in found)
            parts.append("\n".join(f"- `{one[1]}`: {md(' '.join(one[2].split()))}" for one in named if one))
        elif part.startswith("Example::"):
            example = textwrap.dedent(part.partition("::")[2]).strip("\n")
            parts += ["Example:", block("python", example.replace("…", "..."))]
        else:
            parts.append(md(" ".join(part.split())))
    return join(*parts)


def recipe_schema() -> str:
    """Return the keys of a recipe file, table by table."""
    parts = [
        "# Recipe",
        "A recipe is a TOML file: `thrifty plan kjv --out plan.toml` writes one, and each run folder has its own as "
        "`recipe.toml`. On the command line, `--set data.batch=16` changes a key. `[techniques]` has one table per "
        'technique, such as `[techniques."adapters.lora"]`, with the settings of its page.',
    ]
    top = [each for each in settings_of(recipe.Recipe) if each["type"] in ("str", "int", "bool")]
    parts += ["## Top level", settings_table(top, attribute_texts(recipe.Recipe))]
    for section, kind in RECIPE_TABLES.items():
        texts = attribute_texts(kind)
        parts += [f"## [{section}]", md(" ".join((kind.__doc__ or "").split()))]
        parts.append(settings_table(settings_of(kind), texts))
    return join(*parts)


def exit_codes() -> str:
    """Return the exit codes of commands."""
    kinds = (errors.UsageError, errors.InfeasibleError, errors.IntegrityError)
    body = [
        (code(0), "Success."),
        (code(1), "A run failed, a promise is broken, or a saved result is not reproduced."),
        *((code(kind.exit_code), (kind.__doc__ or "").partition("\n")[0]) for kind in kinds),
        (code(130), "Stopped by Ctrl-C (SIGINT). A training run saves a checkpoint first."),
        (code(143), "Stopped by SIGTERM. A training run saves a checkpoint first."),
    ]
    return join(
        "# Exit codes",
        table(("code", "meaning"), body),
        "In Python, the codes 2, 3 and 4 are the exceptions `UsageError`, `InfeasibleError` and `IntegrityError`. All "
        "are a `thrifty.ThriftyError`, with the message in `what` and the fix in `fix`.",
    )


def examples() -> str:
    """Return the scripts in `examples/` with their descriptions."""
    parts = ["# Examples", "Each script runs in about a minute on two cores and downloads nothing."]
    for file in sorted((ROOT / "examples").glob("*.py")):
        script = file.read_text(encoding="utf-8")
        about, _, rest = (ast.get_docstring(ast.parse(script)) or "").partition("\n\n")
        code = script.partition('"""\n\n')[2]
        parts += [
            f"## {md(file.name)}",
            md(about),
            docstring(rest.partition("\n\n")[2]),
            block("python", code.rstrip()),
        ]
    return join(*parts)


# documents of the repository


def document(file: str) -> str:
    """Return a document with links to pages; a link to a file without a page becomes the path of the file."""
    pages = {path: f"{name}.md" for name, path in DOCUMENTS.items()}
    folder = Path(file).parent

    def link(match: re.Match[str]) -> str:
        path = (folder / match[2]).as_posix()
        return f"[{match[1]}]({pages[path]})" if path in pages else f"`{path}`"

    text = (ROOT / file).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!http)([^)#]+)\)", link, text)


if __name__ == "__main__":
    write_pages(Path(__file__).parent / "generated")
