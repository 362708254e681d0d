"""Offline page for simulations: bars and tables in the style of reports, without scripts or external resources."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 960, 250, 110
"""Widths in pixels of a chart, of its row names, and of the values to the right of the bars."""
BAR, GAP = 13, 10
COLOURS = ("train", "held-out", "trained")
"""Palette colors of up to three series."""


@dataclass(frozen=True)
class StackedBar:
    """Bar of consecutive segments, followed by a text. Each segment is fainter than the previous segment."""

    parts: tuple[float, ...]
    text: str


def page(title: str, about: str, body: Sequence[str]) -> str:
    """Return a complete page with the HTML sections of `body`; `title` and `about` are plain text."""
    from thrifty.reporting.page_templates import template

    return template("simulation.html").render(title=title, about=about, sections="".join(body))


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def figure(title: str, unit: str, svg: str, legend: str = "") -> str:
    caption = f'<h3>{escape(title)} <span class="unit">{escape(unit)}</span></h3>{legend}'
    return f'<figure class="wide"><figcaption>{caption}</figcaption><div class="chart">{svg}</div></figure>'


def legend(series: Sequence[str]) -> str:
    """Return a legend; empty for a single series."""
    if len(series) < 2:
        return ""
    keys = [
        f'<span style="color: var(--{colour})" aria-hidden="true">■</span> {escape(name)}'
        for name, colour in zip(series, COLOURS, strict=False)
    ]
    return f'<p class="about">{" &nbsp; ".join(keys)}</p>'


def bars(title: str, rows: Sequence[tuple[str, Mapping[str, StackedBar]]], series: Sequence[str]) -> str:
    """Return an SVG with one group of horizontal bars per row. A group has one bar per series. All bars have the same
    scale, which starts at 0.
    """
    longest = max((sum(bar.parts) for _, group in rows for bar in group.values()), default=0.0) or 1.0
    height = sum(len(group) * (BAR + 2) + GAP for _, group in rows)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" font-size="12">']
    y = 0.0
    for name, group in rows:
        middle = y + len(group) * (BAR + 2) / 2 + 4
        parts.append(f'<text x="0" y="{middle:.1f}" fill="var(--ink)">{escape(shorten(name, 40))}</text>')
        for key, bar in group.items():
            x, colour = float(LEFT), COLOURS[series.index(key) % len(COLOURS)]
            for number, part in enumerate(bar.parts):
                wide = part / longest * (WIDTH - LEFT - RIGHT)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{BAR}" fill="var(--{colour})" '
                    f'opacity="{0.4**number:.2f}"/>'
                )
                x += wide
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 10.5:.1f}" fill="var(--ink)">{escape(bar.text)}</text>')
            y += BAR + 2
        y += GAP
    return "".join([*parts, "</svg>"])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str]) -> str:
    """Return an HTML table of texts. Columns named in `numbers` are right-aligned."""

    def cells(kind: str, row: Sequence[str]) -> str:
        scope, number = ' scope="col"' if kind == "th" else "", ' class="number"'
        return "".join(
            f"<{kind}{scope}{number if columns[index] in numbers else ''}>{escape(cell)}</{kind}>"
            for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="compact"><thead><tr>{cells("th", columns)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def details_block(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
