"""Notebook view of a run: HTML with embedded images, without scripts or external resources.

Importing this module adds the notebook view to `RunRecord`.
"""

import base64
from collections.abc import Sequence

from thrifty.reporting.key_figures import key_figures, verdict
from thrifty.reporting.page_templates import template
from thrifty.reporting.run_charts import figures
from thrifty.reporting.run_page import picture
from thrifty.reporting.run_record import RunRecord, read_run
from thrifty.reporting.run_tables import TextTable, tiles

__all__ = ["piece", "read_run", "run_html"]

PICTURES = ("loss", "memory")


def run_html(record: RunRecord) -> str:
    """Return HTML with a run's current verdict, loss, memory and key figures."""
    key = key_figures(record)
    charts = [figure for figure in figures(record, key) if figure.id in PICTURES]
    addresses = ["data:image/png;base64," + base64.b64encode(picture(figure)).decode() for figure in charts]
    pictures = list(zip(addresses, [f"{figure.title}. {figure.summary}" for figure in charts], strict=True))
    numbers = TextTable("Key numbers", ("Figure", "Value", ""), tiles(key))
    return piece(f"{record.name}: {key.status}", [verdict(key), *record.damage], [numbers], pictures)


def piece(
    title: str, sentences: Sequence[str], tables: Sequence[TextTable], pictures: Sequence[tuple[str, str]] = ()
) -> str:
    """Return HTML for a notebook. `pictures` are pairs of a data URL and a text alternative."""
    return template("notebook.html").render(title=title, sentences=sentences, tables=tables, pictures=pictures)


RunRecord._repr_html_ = run_html  # set here, because the reader module must not import charts
