"""Published figures beside ours as one page in the look of reports: no script, and nothing that is fetched."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
COLUMNS = ("paper", "place", "quantity", "grade", "published", "simulated", "off", "gap")
WIDTH, LINE, LEFT = 960, 30, 470
"""Pixels of the chart, of a row in it, and of what stands before its axis."""
TICKS = (0.5, 0.7, 1.0, 1.4, 2.0)


def write_page(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A chart of ours over published, on a logarithmic axis, and all rows as a table. `rows` are those of
    `thrifty simulate paper --json`."""
    from thrifty.report.palette import DARK, LIGHT

    light, dark = ("".join(f"--{name}: {colour}; " for name, colour in look.items()) for look in (LIGHT, DARK))
    css = files("thrifty.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Accelerators: published and simulated</title>
<style>
:root {{ {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
{css}
</style>
</head>
<body>
<main>
<h1>Accelerators: published and simulated</h1>
<p class="about">Grades: P read in the paper, R in released source or data, S from notes on the paper.</p>
<figure class="wide">
<figcaption><h3>Simulated over published <span class="unit">1 is equal, logarithmic</span></h3></figcaption>
<div class="chart">{chart(rows)}</div>
</figure>
<div class="scroll">{table(rows)}</div>
</main>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


def place(ratio: float) -> float:
    """Pixels from the left at which a ratio stands; beyond the axis, at its end."""
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    share = (min(max(math.log(ratio), low), high) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - 90)


def chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG with a point for each row, its ratio written out."""
    height = LINE * (len(rows) + 1)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Simulated over published" font-size="12">']
    for tick in TICKS:
        x = f"{place(tick):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height - LINE}" stroke="var(--line)"/>')
        parts.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle" fill="var(--muted)">{tick:g}</text>')
    for number, row in enumerate(rows):
        ratio, y = row["simulated"] / row["published"], LINE * number + LINE / 2
        title = f"{row['paper'].partition(' (')[0]}: {row['quantity']}"
        short = title if len(title) <= 72 else f"{title[:71]}…"
        parts.append(f'<text x="0" y="{y + 4}" fill="var(--ink)">{escape(short)}</text>')
        parts.append(f'<circle cx="{place(ratio):.1f}" cy="{y}" r="5" fill="var(--accent)"/>')
        parts.append(f'<text x="{place(ratio) + 10:.1f}" y="{y + 4}" fill="var(--ink)">{ratio:.3f}</text>')
    return "".join([*parts, "</svg>"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows, numbers to four digits."""
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    lines = ["".join(f"<td>{escape(_cell(name, row[name]))}</td>" for name in COLUMNS) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: object) -> str:
    if isinstance(value, (int, float)):
        return f"{value:+.1%}" if name == "off" else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return str(value)
