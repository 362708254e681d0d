"""Verdicts of a check: one for each promise."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import RenderableType
from rich.markup import escape

from thrifty.core.errors import for_reader
from thrifty.reporting.printed_result import PrintedResult, lines, open_table

Outcome = Literal["holds", "broken", "not applicable"]
COLOURS = {"holds": "green", "broken": "bold red", "not applicable": "dim"}


@dataclass(frozen=True)
class PromiseVerdict:
    promise: str
    """Short name of the promise, such as "exact", "rounding" or "gradients arrive"."""
    about: str
    """Technique that makes the promise, or the affected part of the run."""
    outcome: Outcome
    measured: str
    """Measured value and its limit. For "not applicable", the reason."""
    fix: str = ""
    """Smallest change that fulfills a broken promise."""


def holds(promise: str, about: str, measured: str) -> PromiseVerdict:
    return PromiseVerdict(promise, about, "holds", measured)


def broken(promise: str, about: str, measured: str, fix: str) -> PromiseVerdict:
    return PromiseVerdict(promise, about, "broken", measured, fix)


def not_applicable(promise: str, about: str, why: str) -> PromiseVerdict:
    return PromiseVerdict(promise, about, "not applicable", why)


@dataclass(frozen=True, repr=False)
class CheckReport(PrintedResult):
    """Result of checking a recipe."""

    name: str
    verdicts: tuple[PromiseVerdict, ...]
    cuts: tuple[str, ...]
    """Texts that describe how the check reduces the recipe's size."""
    preview: tuple[str, ...]
    """Example as text, with learned tokens between ⟦ and ⟧; empty if examples are not text."""
    seconds: float

    @property
    def broken(self) -> tuple[PromiseVerdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.outcome == "broken")

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """0, or 4 if a promise is broken."""
        return 4 if self.broken else 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": not self.broken, "exit_code": self.exit_code}

    def __rich__(self) -> RenderableType:
        table = open_table("promise", "of", "verdict", "measured")
        for verdict in self.verdicts:
            text = verdict.measured + (f"\nfix: {for_reader(verdict.fix)}" if verdict.fix else "")
            colour = COLOURS[verdict.outcome]
            outcome = f"[{colour}]{verdict.outcome}[/{colour}]"
            table.add_row(escape(verdict.promise), escape(verdict.about), outcome, escape(text))
        previews = [f"\nexample, with learned tokens between ⟦ and ⟧\n{text}" for text in self.preview]
        result = f"{len(self.broken)} broken" if self.broken else "nothing is broken"
        checked = sum(verdict.outcome != "not applicable" for verdict in self.verdicts)
        last = f"\n{result}; {checked} promises checked in {self.seconds:g} s"
        return lines(f"{self.name}: {', '.join(self.cuts)}\n", table, *previews, last)
