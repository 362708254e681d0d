"""Answers, and what a page that is open is told when it asks again."""

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
"""Of the board's own pages: scripts are files of its own, and nothing is asked of anybody else. Vega sets styles."""


@dataclass(frozen=True)
class PageResponse:
    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    policy: str = OWN_POLICY
    lasting: bool = False
    """Whether a browser may keep it."""


def changed_parts(told: dict[str, Any], query: Query, version: str, more: Callable[[], dict[str, Any]]) -> PageResponse:
    """What changes with every question, and the rest where the asker has another version of it."""
    told |= {"version": version, **({"same": True} if query.get("have") == version else more())}
    return PageResponse(json.dumps(told, allow_nan=False).encode(), "application/json")


def figure_data(figure: ChartFigure) -> dict[str, Any]:
    """A chart for the script of the page."""
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
    """A third of the bytes of a list of objects with the same keys."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
