"""Report of a run: one self-contained HTML file, and its charts as images in plots/."""

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from thrifty.core.atomic_files import AtomicFiles, refuse_links
from thrifty.reporting import example_gallery, run_tables
from thrifty.reporting.chart_renderer import vega_bundle
from thrifty.reporting.color_theme import chart_look, css_variable
from thrifty.reporting.key_figures import key_figures, verdict
from thrifty.reporting.page_templates import asset, template
from thrifty.reporting.run_charts import ChartFigure, figures
from thrifty.reporting.run_record import RunRecord, read_run
from thrifty.reporting.saved_chart import SavedChart

SECTIONS = [
    ("curves", "Curves"),
    ("predictions", "Predictions"),
    ("techniques", "Techniques"),
    ("examples", "Examples"),
    ("timeline", "Timeline"),
    ("repeat", "Repeat this run"),
    ("environment", "Environment"),
]


def write_report(folder: Path) -> Path:
    """Write report.html and plots/*.png into a run folder and return the path of the page.

    Works also during the run and with missing files. Raises UsageError if `folder` is not a run folder, or contains a
    symbolic link.
    """
    return write_page(read_run(folder))


def write_page(record: RunRecord) -> Path:
    charts = figures(record, key_figures(record))
    page, plots = record.folder / "report.html", record.folder / "plots"
    refuse_links(record.folder)
    AtomicFiles().swap_text(page, render(record, charts))
    plots.mkdir(exist_ok=True)
    for figure in charts:
        AtomicFiles().swap(plots / f"{figure.id}.png", picture(figure))
    return page


def render(record: RunRecord, charts: Sequence[ChartFigure]) -> str:
    """Return the page as text. The page is deterministic."""
    key = key_figures(record)
    vega, script = vega_bundle(), script_of_reports()
    predictions = example_gallery.rows(record.pictures)
    absent = {name for name, content in (("examples", record.selection), ("predictions", predictions)) if not content}
    return template("report.html").render(
        record=record,
        key=key,
        verdict=verdict(key),
        sections=[section for section in SECTIONS if section[0] not in absent],
        tiles=run_tables.tiles(key),
        figures=charts,
        techniques=run_tables.techniques(record, key),
        parts=run_tables.predicted_parts(record),
        seen=example_gallery.seen(record.pictures),
        predictions=predictions,
        selected=example_gallery.sentence(record.selection),
        kept=example_gallery.kept_by_label(record.selection),
        groups=example_gallery.groups(record.selection),
        timeline=run_tables.timeline(record),
        settings=run_tables.settings(record),
        environment=run_tables.environment(record),
        repeat=repeat_command(record),
        command=original_command(record),
        extensions=extension_commands(record),
        charts=_charts_json(charts),
        policy=_policy([vega, script]),
        vega=vega,
        script=script,
    )


def picture(figure: ChartFigure) -> bytes:
    """Return a chart as PNG on a white background."""
    return SavedChart({**figure.titled, "width": 880, "height": 400}).png()


def repeat_command(record: RunRecord) -> str:
    inside_runs = record.folder.parent.name == "runs"
    recipe = Path("runs") / record.name / "recipe.toml" if inside_runs else Path("recipe.toml")
    return shlex.join(["thrifty", "train", str(recipe)])


def extension_commands(record: RunRecord) -> str:
    """Return the commands that extended the budget of the run, one per line."""
    commands = (["thrifty", "resume", record.name, "--budget", asked] for asked in record.extensions)
    return "\n".join(map(shlex.join, commands))


def original_command(record: RunRecord) -> str:
    command = record.environment.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command or "")


def _charts_json(charts: Sequence[ChartFigure]) -> str:
    specs = {figure.id: figure.whole for figure in charts}
    text = json.dumps({"config": chart_look(css_variable), "specs": specs}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def scripts_policy() -> str:
    """Return a content security policy that allows only the scripts of reports, for pages from any origin."""
    return _policy([vega_bundle(), script_of_reports()])


def script_of_reports() -> str:
    return asset("report.js") + asset("copy_button.js")


def _policy(scripts: Sequence[str]) -> str:
    """Return a policy that allows only `scripts`, and no requests. It protects the page even if text of a run is not
    escaped correctly.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    sources = f"script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
