"""Pages of studies: claim, verdicts, charts and data."""

import inspect
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from generator.documents import RESULTS
from generator.markdown import Markdown, block, code, join, md, table, toctree
from thrifty.experiments import studies
from thrifty.experiments.study import StudyPlot
from thrifty.experiments.study_charts import SERIES, caption, chart
from thrifty.experiments.study_result import StudyCell, StudyResult, read_result
from thrifty.experiments.study_table import measured_on, rows, spread
from thrifty.reporting.chart_renderer import render_svg
from thrifty.reporting.color_theme import DARK, LIGHT, chart_look, css_variable

DARK_SERIES = ["#56b4e9", "#f0884a", "#3cc79e", "#d98bbd", "#d6b73f", "#9ed6f5", "#b9c0c7", "#e69f00"]
"""Colors of `study_charts.SERIES` on a dark page."""


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
