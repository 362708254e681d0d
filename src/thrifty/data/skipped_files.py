"""Count and names of unusable files of a source."""

import os
from dataclasses import dataclass, field

SHOWN = 5
"""Maximum number of file names in a message."""
KEPT = 1000
"""Maximum number of file names that are stored."""


@dataclass
class SkippedFiles:
    """Number of unusable files, and their names with the reasons."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, name: object, why: object) -> None:
        self.count += 1
        if len(self.named) < KEPT:
            self.named.append(f"{printable(str(name))}: {why}")

    def __str__(self) -> str:
        more = f"; and {self.count - SHOWN} more" if self.count > SHOWN else ""
        return "; ".join(self.named[:SHOWN]) + more


def printable(name: str) -> str:
    """Return a file's name as printable text.

    Bytes that are not UTF-8, and control characters, become replacement characters.
    """
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)
