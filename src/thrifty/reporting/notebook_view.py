"""Notebook view of a run: one piece of HTML with pictures in it, which needs no script and fetches nothing.

A run read by `read_run` of this module shows itself in a notebook.
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
    """Verdict, loss, memory and key numbers of a run as it is now."""
    key = key_figures(record)
    drawn = [figure for figure in figures(record, key) if figure.id in PICTURES]
    addresses = ["data:image/png;base64," + base64.b64encode(picture(figure)).decode() for figure in drawn]
    pictures = list(zip(addresses, [f"{figure.title}. {figure.summary}" for figure in drawn], strict=True))
    numbers = TextTable("Key numbers", ("What", "Value", ""), tiles(key))
    return piece(f"{record.name}: {key.status}", [verdict(key), *record.damage], [numbers], pictures)


def piece(
    title: str, sentences: Sequence[str], tables: Sequence[TextTable], pictures: Sequence[tuple[str, str]] = ()
) -> str:
    """HTML for a notebook; `pictures` are addresses that hold a picture, with what it says in words."""
    return template("notebook.html").render(title=title, sentences=sentences, tables=tables, pictures=pictures)


RunRecord._repr_html_ = run_html  # the reader below knows nothing of charts
