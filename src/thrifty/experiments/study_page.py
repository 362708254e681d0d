"""Page of a study: a self-contained HTML file, and its plots as images in plots/."""

import shlex
from pathlib import Path

from thrifty.core.atomic_files import AtomicFiles, refuse_links
from thrifty.core.secret_redaction import redact, redact_command
from thrifty.experiments.study import StudyPlot
from thrifty.experiments.study_charts import caption, titled_chart
from thrifty.experiments.study_result import StudyResult
from thrifty.experiments.study_table import rows, sentence, spread
from thrifty.reporting.notebook_view import piece
from thrifty.reporting.number_format import duration
from thrifty.reporting.page_templates import template
from thrifty.reporting.run_tables import TextTable
from thrifty.reporting.saved_chart import SavedChart
from thrifty.training.run_folder import RunFolder

FACTS = ("cpu", "gpu", "cores", "device", "torch", "python", "thrifty", "platform", "started")


def write_page(result: StudyResult, folder: Path) -> Path:
    """Write report.html and plots/*.png; return the path of the page."""
    run = RunFolder(folder)
    refuse_links(folder.resolve())
    run.plots.mkdir(exist_ok=True)
    for plot in result.study.plots:
        AtomicFiles().swap(run.plots / f"{plot.id}.png", SavedChart(titled_chart(result, plot)).png())
    run.write_text(run.report.name, render(result))
    return run.report


def render(result: StudyResult) -> str:
    study, (head, body) = result.study, rows(result)
    facts = redact(dict(result.environment))
    return template("study.html", "thrifty.experiments").render(
        study=study,
        finished=result.finished,
        verdicts=[(verdict.verdict, sentence(verdict)) for verdict in result.verdicts],
        figures=[(plot, caption(result, plot), _data_url(result, plot)) for plot in study.plots],
        head=head,
        body=body,
        quantities=[(name, quantity.about) for name, quantity in study.quantities.items() if name in head],
        spread=spread(result),
        facts=[(name, facts[name]) for name in FACTS if name in facts],
        spent=duration(sum(cell.seconds for cell in result.cells.values())),
        command=shlex.join(redact_command(result.environment.get("command", []))),
    )


def study_html(result: StudyResult) -> str:
    """Render a study for a notebook: expectations and table of means."""
    study, (head, body) = result.study, rows(result)
    title = study.name if result.finished else f"{study.name}: in progress"
    sentences = [study.about, *map(sentence, result.verdicts)]
    return piece(title, sentences, [TextTable("Means by case", head, body, frozenset(range(1, len(head))))])


StudyResult._repr_html_ = study_html


def _data_url(result: StudyResult, plot: StudyPlot) -> str:
    """Return a plot as a data URL. The page therefore loads no external resources and runs no scripts."""
    return SavedChart(titled_chart(result, plot)).data_url()
