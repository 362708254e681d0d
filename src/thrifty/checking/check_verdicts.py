"""What a check says of each promise."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["holds", "broken", "not applicable"]


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


@dataclass(frozen=True)
class CheckReport:
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
    def exit_code(self) -> int:
        """0, or that of a broken promise."""
        return 4 if self.broken else 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": not self.broken, "exit_code": self.exit_code}
