"""Page of a result: a self-contained HTML file with verdict, charts and tables, without scripts. Comparisons, studies,
sweeps, lotteries, plans and benchmarks have this page.
"""

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from thrifty.core.secret_redaction import redact, redact_command
from thrifty.reporting.page_templates import template
from thrifty.reporting.run_tables import TextTable
from thrifty.reporting.saved_chart import page_svg

WIDE, HALF, PHONE = 960, 430, 262
"""Widths in pixels of a plot: over the page, over half of it, and on a phone."""
FACTS = ("cpu", "gpu", "cores", "device", "torch", "python", "thrifty", "platform", "started")
GOOD, BAD = "good", "bad"
"""Tones of a verdict."""


CHARACTER, LINE = 7, 14
"""Width and height in pixels of a character of a label, rounded up."""


@dataclass(frozen=True)
class RowLabels:
    """Labels of the rows of a chart of `width` pixels. Long labels are wrapped; labels take half the width at most."""

    labels: Sequence[str]
    width: int

    def wrap(self, label: str) -> str:
        return "\n".join(textwrap.wrap(label, self.width // 2 // CHARACTER))

    def axis(self) -> alt.Axis:
        return alt.Axis(labelExpr="split(datum.value, '\\n')", labelLimit=self.width)

    def size(self) -> dict[str, Any]:
        """Return the width and height of the plot next to the labels."""
        lines = [self.wrap(label).split("\n") for label in self.labels]
        longest = max((len(line) for each in lines for line in each), default=0)
        most = max(map(len, lines), default=1)
        return {"width": self.width - CHARACTER * max(longest - 5, 0), "height": alt.Step(10 + LINE * most)}


@dataclass(frozen=True)
class PageVerdict:
    """Verdict in large words, with a sentence and a note."""

    headline: str
    sentence: str = ""
    note: str = ""
    tone: str = ""
    """`GOOD`, `BAD` or ""."""


@dataclass(frozen=True)
class PageChart:
    """Chart as SVG in two widths. The SVG follows the color scheme of the page."""

    title: str
    caption: str
    wide: str
    narrow: str
    is_whole: bool = True
    """True for a chart over the whole width of the page."""


def page_chart(
    title: str, caption: str, drawn: Callable[[int], alt.LayerChart | alt.Chart], is_whole: bool = True
) -> PageChart:
    """Return a chart for a page. `drawn` returns the chart for a width of the plot in pixels."""
    wide, narrow = (page_svg(drawn(width).to_dict()) for width in (WIDE if is_whole else HALF, PHONE))
    return PageChart(title, caption, wide, narrow, is_whole)


@dataclass(frozen=True, kw_only=True)
class ResultPage:
    """Content of a result's page. Empty parts are left out."""

    kind: str
    """Kind of the result, such as "comparison"."""
    name: str
    status: str
    about: str
    verdicts: Sequence[PageVerdict] = ()
    statements: Sequence[tuple[str, str, str]] = ()
    """Tone, word and sentence of each checked statement."""
    rule: str = ""
    """Rule of the verdicts."""
    pending: str = ""
    """Sentence shown while there are no verdicts."""
    cautions: Sequence[str] = ()
    error: str = ""
    charts: Sequence[PageChart] = ()
    tables: Sequence[TextTable] = ()
    folded: Sequence[TextTable] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Long texts that can be copied, such as a recipe, by title. They are folded."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts on the machine and the command; only `FACTS` and the command are shown."""
    spent: str = ""
    source: str = ""
    """Sentence on the file with the values."""

    def render(self) -> str:
        """Return the page as text. The page is deterministic."""
        facts = redact(dict(self.facts))
        return template("result.html").render(
            page=self,
            facts=[(name, facts[name]) for name in FACTS if facts.get(name) not in (None, "")],
            command=shlex.join(redact_command(facts.get("command") or [])),
        )
