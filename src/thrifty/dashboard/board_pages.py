"""Pages of the board as text, and page parts that are updated live."""

import functools
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from markupsafe import Markup, escape

from thrifty.dashboard.run_summary import RunListRow
from thrifty.reporting import run_tables
from thrifty.reporting.color_theme import DARK, LIGHT
from thrifty.reporting.key_figures import KeyFigures, verdict
from thrifty.reporting.number_format import scaled, significant, whole
from thrifty.reporting.page_templates import asset, environment
from thrifty.reporting.run_curves import CurvePoint
from thrifty.reporting.run_record import RunRecord
from thrifty.reporting.run_state import FINISHED, RUNNING

SORTS = {
    "name": ("Run", lambda row: row.name, False),
    "state": ("State", lambda row: (row.state != RUNNING, row.state == FINISHED, row.name), False),
    "step": ("Step", lambda row: row.step, True),
    "loss": ("Loss", lambda row: _last_if_missing(row.loss), False),
    "held_out": ("Held-out loss", lambda row: _last_if_missing(row.held_out_loss), False),
    "rate": ("Per second", lambda row: row.tokens_per_second or 0.0, True),
    "updated": ("Updated", lambda row: row.updated, True),
}
"""Sortable columns of the run list: title, sort key, and True for descending order."""
UNSORTED = "updated"
"""Default sort column."""


def page(name: str, **values: Any) -> str:
    """Return a complete page from the template called `name`."""
    return _environment().get_template(f"{name}.html").render(**values)


def part(template: str, name: str, *values: Any) -> str:
    """Return a part of a page: the output of a template macro for `values`."""
    return getattr(_environment().get_template(template).module, name)(*values)


def framed(page: str, here: str) -> str:
    """Return an offline page with the navigation of the board. The board's content policy replaces the page's own."""
    style = '<link rel="stylesheet" href="board.css">'
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', style, page, count=1)
    return page.replace("<body>", f"<body>{part('navigation.html', 'top', here)}", 1)


def sorted_rows(rows: Sequence[RunListRow], by: str) -> list[RunListRow]:
    _, key, reverse = SORTS[by]
    return sorted(rows, key=key, reverse=reverse)


def folded(rows: Sequence[RunListRow], groups: Sequence[tuple[str, str, str]]) -> list[RunListRow]:
    """Return one row for each of `groups` that has runs, with these runs as members, and the rows of all other runs.
    A group is its name, its kind and a description.
    """
    shown = [row for row in rows if not row.group]
    for name, kind, about in groups:
        members = [row for row in rows if row.group == name]
        if members:
            shown.append(_group_row(name, kind, about, members))
    return shown


def _group_row(name: str, kind: str, about: str, members: Sequence[RunListRow]) -> RunListRow:
    """Return a row with the last update, the most steps and the lowest losses of the members."""
    states = [row.state for row in members]
    open_states = [state for state in states if state != FINISHED]
    losses, held_out = (
        [value for value in values if value is not None]
        for values in ([row.loss for row in members], [row.held_out_loss for row in members])
    )
    return RunListRow(
        name=name,
        about=about,
        recipe=members[0].recipe,
        techniques=tuple(sorted({each for row in members for each in row.techniques})),
        state=RUNNING if RUNNING in states else open_states[0] if open_states else FINISHED,
        reason=f"{states.count(FINISHED)} of {len(states)} runs" if open_states else "",
        step=max(row.step for row in members),
        steps=None,
        loss=min(losses, default=None),
        held_out_loss=min(held_out, default=None),
        tokens_per_second=None,
        updated=max(row.updated for row in members),
        sparkline=(),
        kind=kind,
        members=tuple(members),
    )


def run_parts(record: RunRecord, key: KeyFigures) -> dict[str, str]:
    """Return, by name, the parts of a run's page that change during the run."""
    return {
        "verdict": part("run_parts.html", "sentence", verdict(key)),
        "damage": part("run_parts.html", "damage", record.damage),
        "tiles": part("run_parts.html", "tiles", run_tables.tiles(key)),
        "timeline": part("run_parts.html", "events", run_tables.timeline(record)),
        "techniques": part("run_parts.html", "cards", run_tables.techniques(record, key)),
    }


def style() -> str:
    """Return the style sheet: the style of reports, the palettes, and the board's own rules."""
    colours = ["".join(f"--{name}: {colour}; " for name, colour in palette.items()) for palette in (LIGHT, DARK)]
    light, dark = f":root {{ {colours[0]}}}", f":root {{ {colours[1]}}}"
    dark = f"@media screen and (prefers-color-scheme: dark) {{ {dark} }}"
    return "\n".join((light, dark, asset("report.css"), asset("board.css", "thrifty.dashboard")))


def script() -> str:
    return asset("board.js", "thrifty.dashboard") + asset("copy_button.js")


def code(text: str) -> Markup:
    """Return escaped text with the parts between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped before


def sparkline(points: Sequence[CurvePoint]) -> str:
    """Return an SVG path through the points in a 100 x 24 box; empty for fewer than two points."""
    if len(points) < 2:
        return ""
    first, last = points[0].step, points[-1].step
    low, high = min(point.value for point in points), max(point.value for point in points)
    wide, tall = last - first or 1, high - low or 1.0
    coordinates = [(100 * (point.step - first) / wide, 23 - 22 * (point.value - low) / tall) for point in points]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in coordinates)


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _last_if_missing(value: float | None) -> float:
    return float("inf") if value is None else value


@functools.cache
def _environment() -> jinja2.Environment:
    templates = environment("thrifty.dashboard")
    templates.globals |= {"sparkline": sparkline, "sorts": SORTS}
    templates.filters |= {"significant": significant, "scaled": scaled, "whole": whole, "clock": clock, "code": code}
    return templates
