"""Responses of the board, and JSON updates for open pages."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from thrifty.dashboard import board_pages
from thrifty.reporting.run_charts import ChartFigure

Query = Mapping[str, str]
OWN_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the board's pages. It allows only own scripts and no external requests. Inline styles are
allowed, because Vega sets them.
"""


@dataclass(frozen=True)
class PageResponse:
    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    policy: str = OWN_POLICY
    lasting: bool = False
    """True if a browser may cache the response."""


def changed_parts(
    update: dict[str, Any], query: Query, version: str, more: Callable[[], dict[str, Any]]
) -> PageResponse:
    """Return values that change with every request. If the page has a different version, also return all other
    values.
    """
    update |= {"version": version, **({"same": True} if query.get("have") == version else more())}
    return PageResponse(json.dumps(update, allow_nan=False).encode(), "application/json")


def figure_data(figure: ChartFigure) -> dict[str, Any]:
    """Return a chart as data for the script of the page."""
    return {
        "id": figure.id,
        "title": figure.title,
        "summary": figure.summary,
        "caption": board_pages.part("run_parts.html", "caption", figure),
        "numbers": board_pages.part("run_parts.html", "numbers", figure),
        "spec": figure.spec,
        "data": {name: _columns(rows) for name, rows in figure.data.items()},
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns, because columns take a third of the bytes."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
