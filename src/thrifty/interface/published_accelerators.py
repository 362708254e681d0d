"""Published results of accelerators compared with simulated results, as a table and an offline HTML page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from thrifty.reporting.bar_page import StackedBar, bars, figure, legend, page, shorten, table
from thrifty.reporting.printed_result import PrintedResult, lines, number_table
from thrifty.simulators.accelerator.published_claims import claims

COLUMNS = ("paper", "place", "quantity", "grade", "published", "simulated", "off", "gap")
WIDTH, LINE, LEFT = 960, 30, 470
"""Pixels: width of the chart, height of a row, width of the labels left of the axis."""
TICKS = (0.5, 0.7, 1.0, 1.4, 2.0)
SERIES = ("published", "simulated")


@dataclass(frozen=True, repr=False)
class PublishedAccelerators(PrintedResult):
    """Published quantities: grade of the evidence, source, simulated value, and reason for the difference."""

    claims: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"claims": list(self.claims)}

    def __rich__(self) -> RenderableType:
        head = ["paper", "quantity", "grade", "published", "simulated", "off"]
        rows = [
            [*(row[key] for key in head[:3]), *(f"{row[key]:,.4g}" for key in head[3:5]), f"{row['off']:+.1%}"]
            for row in self.claims
        ]
        gaps = dict.fromkeys(f"{row['paper']}, {row['place']}: {row['gap']}" for row in self.claims)
        return lines(number_table(head, rows), "", *gaps)

    def write_page(self, path: Path) -> None:
        """Write an HTML page: a chart of the ratio simulated / published on a logarithmic axis, bar charts of published
        figures, and a table of all rows.
        """
        figures = list(dict.fromkeys(row["figure"] for row in self.claims if row["figure"]))
        single = [row for row in self.claims if not row["figure"]]
        body = [figure("Simulated over published", "1: equal; logarithmic axis", chart(single))] if single else []
        for name in figures:
            group = [row for row in self.claims if row["figure"] == name]
            title = f"{group[0]['paper']}, {group[0]['place']}: {name}"
            body.append(figure(title, "bar by bar", bars(title, _paired(group), SERIES), legend(SERIES)))
        cells = [[_cell(name, row[name]) for name in COLUMNS] for row in self.claims]
        about = (
            "Grades: P: read in the paper; R: from released source or data; S: from notes on the paper. "
            "ELSA's speedups and energies compare twelve accelerators with one V100."
        )
        body.append(table(COLUMNS, cells, ("published", "simulated", "off")))
        path.write_text(page("Accelerators: published and simulated", about, body), encoding="utf-8")


def claimed_and_simulated() -> Iterator[dict[str, Any]]:
    """Simulate each published quantity and yield rows of `PublishedAccelerators`."""
    for claim in claims():
        ours = claim.simulate()
        yield vars(claim) | {"simulated": ours, "off": ours / claim.published - 1}


def _paired(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, StackedBar]]]:
    """Return two bars per row: the published value, and the simulated value with its deviation."""
    return [
        (
            row["quantity"].removeprefix(f"{row['figure']}, "),
            {
                "published": StackedBar((row["published"],), f"{row['published']:.4g}"),
                "simulated": StackedBar((row["simulated"],), f"{row['simulated']:.4g} ({row['off']:+.0%})"),
            },
        )
        for row in rows
    ]


def place(ratio: float) -> float:
    """Return the horizontal position in pixels of a ratio, clipped to the axis."""
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    share = (min(max(math.log(ratio), low), high) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - 90)


def chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG with one point and one ratio per row."""
    height = LINE * (len(rows) + 1)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Simulated over published" font-size="12">']
    for tick in TICKS:
        x = f"{place(tick):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height - LINE}" stroke="var(--line)"/>')
        parts.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle" fill="var(--muted)">{tick:g}</text>')
    for number, row in enumerate(rows):
        ratio, y = row["simulated"] / row["published"], LINE * number + LINE / 2
        title = shorten(f"{row['paper'].partition(' (')[0]}, {row['place']}: {row['quantity']}", 68)
        parts.append(f'<text x="0" y="{y + 4}" fill="var(--ink)">{escape(title)}</text>')
        parts.append(f'<circle cx="{place(ratio):.1f}" cy="{y}" r="5" fill="var(--accent)"/>')
        parts.append(f'<text x="{place(ratio) + 10:.1f}" y="{y + 4}" fill="var(--ink)">{ratio:.3f}</text>')
    return "".join([*parts, "</svg>"])


def _cell(name: str, value: object) -> str:
    if isinstance(value, (int, float)):
        return f"{value:+.1%}" if name == "off" else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return str(value)
