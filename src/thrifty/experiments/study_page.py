"""Page of a study: a self-contained HTML file, and its plots as images in plots/."""

from functools import partial
from pathlib import Path

from thrifty.core.atomic_files import AtomicFiles, refuse_links
from thrifty.experiments.study_charts import caption, chart, titled_chart
from thrifty.experiments.study_result import StudyResult
from thrifty.experiments.study_summary import FAILS, HOLDS, ExpectationVerdict
from thrifty.experiments.study_table import rows, sentence, spread
from thrifty.reporting.notebook_view import piece
from thrifty.reporting.number_format import duration
from thrifty.reporting.result_page import BAD, GOOD, PageVerdict, ResultPage, page_chart
from thrifty.reporting.run_tables import TextTable
from thrifty.reporting.saved_chart import SavedChart
from thrifty.training.run_folder import RunFolder

TONES = {HOLDS: GOOD, FAILS: BAD}


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
    held = sum(verdict.verdict == HOLDS for verdict in result.verdicts)
    quantities = [(name, quantity.about) for name, quantity in study.quantities.items() if name in head]
    charts = [
        page_chart(plot.title, caption(result, plot), partial(chart, result, plot), is_whole=len(study.plots) == 1)
        for plot in study.plots
        if result.cells
    ]
    return ResultPage(
        kind="study",
        name=study.name,
        status="finished" if result.finished else "in progress",
        about=study.about,
        verdicts=[PageVerdict(_headline(held, len(result.verdicts)))] if result.verdicts else [],
        statements=[(TONES.get(each.verdict, ""), *_judged(each)) for each in result.verdicts],
        charts=charts,
        tables=[TextTable("Means by case", head, body, frozenset(range(1, len(head))), spread(result))],
        folded=[TextTable("Measured quantities", ("Quantity", "Meaning"), quantities)] if quantities else [],
        facts=result.environment,
        spent=f"{duration(sum(cell.seconds for cell in result.cells.values()))} of computation in total.",
        source="The values of every run are in study.json, in the same folder.",
    ).render()


def _headline(held: int, expected: int) -> str:
    if held == expected:
        return f"All {expected} expectations hold" if expected > 1 else "The expectation holds"
    return f"{held} of {expected} expectations hold"


def _judged(verdict: ExpectationVerdict) -> tuple[str, str]:
    word, _, text = sentence(verdict).partition(": ")
    return word, text


def study_html(result: StudyResult) -> str:
    """Render a study for a notebook: expectations and table of means."""
    study, (head, body) = result.study, rows(result)
    title = study.name if result.finished else f"{study.name}: in progress"
    sentences = [study.about, *map(sentence, result.verdicts)]
    return piece(title, sentences, [TextTable("Means by case", head, body, frozenset(range(1, len(head))))])


StudyResult._repr_html_ = study_html
