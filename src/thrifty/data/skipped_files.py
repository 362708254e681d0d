"""Files of a source that cannot be used, counted and named."""

import os
from dataclasses import dataclass, field

TOLD = 5
"""Files named in a message."""
KEPT = 1000
"""Files whose names are kept."""


@dataclass
class SkippedFiles:
    """Count and names of files that cannot be used, each with the reason."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, name: object, why: object) -> None:
        self.count += 1
        if len(self.named) < KEPT:
            self.named.append(f"{printable(str(name))}: {why}")

    def __str__(self) -> str:
        more = f"; and {self.count - TOLD} more" if self.count > TOLD else ""
        return "; ".join(self.named[:TOLD]) + more


def printable(name: str) -> str:
    """A file's name as text that can be written anywhere: bytes in it that are not UTF-8, and characters that would
    steer a terminal, become question marks."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)
