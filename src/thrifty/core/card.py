"""Cards: docstrings with sections that describe techniques, objectives and accelerator designs."""

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

SECTIONS = ("Paper", "Promise", "Use", "Start with", "Cost", "Avoid", "Does not")
"""Sections of a card, in order."""

_TITLE = re.compile(r"(?P<title>[^():]+?) \((?P<paper>[^()]+)\): (?P<effect>\S.*)", re.DOTALL)
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)})  +", re.MULTILINE)


@dataclass(frozen=True)
class Card:
    """Parts of a card."""

    title: str
    """Name in the literature, such as "LoRA"; empty if the first paragraph is not "Name (paper): effect"."""
    paper: str
    """Authors and year."""
    effect: str
    """Effect in one clause; the whole first paragraph if it is not "Name (paper): effect"."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Text of each section on one line. "Use" keeps its lines of Python."""
    rest: str = ""
    """Paragraphs between the first line and the first section."""

    @property
    def start(self) -> str:
        """Settings to start with, in the form of the option `--with`: the first code of section "Start with"."""
        code = re.match("`([^`]+)`", self.sections.get("Start with", ""))
        return code[1] if code else ""


def read_card(docstring: str | None) -> Card:
    """Read a card from a docstring. A docstring without sections becomes a card without sections."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n\n")
    first = " ".join(first.split())
    before, *parts = _SECTION.split(f"\n{rest}")
    sections = {
        head: textwrap.dedent(" " * 12 + text).strip() if head == "Use" else " ".join(text.split())
        for head, text in zip(parts[::2], parts[1::2], strict=True)
    }
    title = _TITLE.fullmatch(first)
    named = title.groupdict() if title else {"title": "", "paper": "", "effect": first}
    return Card(**named, sections=sections, rest=before.strip())
