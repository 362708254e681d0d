"""What a check says of each promise."""

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
    """What was promised, in a word: "exact", "rounding", "gradients reach every parameter" and so on."""
    about: str
    """The technique that promised it, or the part of the run."""
    outcome: Outcome
    measured: str
    """What was measured against what was promised; for "not applicable" the reason."""
    fix: str = ""
    """Of a broken promise: the smallest thing to do."""


def holds(promise: str, about: str, measured: str) -> PromiseVerdict:
    return PromiseVerdict(promise, about, "holds", measured)


def broken(promise: str, about: str, measured: str, fix: str) -> PromiseVerdict:
    return PromiseVerdict(promise, about, "broken", measured, fix)


def not_applicable(promise: str, about: str, why: str) -> PromiseVerdict:
    return PromiseVerdict(promise, about, "not applicable", why)


@dataclass(frozen=True, repr=False)
class CheckReport(PrintedResult):
    """A recipe after its check."""

    name: str
    verdicts: tuple[PromiseVerdict, ...]
    cuts: tuple[str, ...]
    """What of the recipe was made smaller for the check."""
    preview: tuple[str, ...]
    """An example with the tokens that are learned between ⟦ and ⟧, where examples are text."""
    seconds: float

    @property
    def broken(self) -> tuple[PromiseVerdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.outcome == "broken")

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """0, or that of a broken promise."""
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
        previews = [f"\nwhat is learned of an example stands between ⟦ and ⟧\n{text}" for text in self.preview]
        said = f"{len(self.broken)} broken" if self.broken else "nothing is broken"
        last = f"\n{said}; {len(self.verdicts)} promises looked at in {self.seconds:g} s"
        return lines(f"{self.name}: {', '.join(self.cuts)}\n", table, *previews, last)
