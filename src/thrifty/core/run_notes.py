"""Notes that techniques leave for the run while a model is changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("surgery notes", default=None)


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """Collects what is said by `note` and `select` inside the block, for `explain`."""
    token = _notes.set(notes := [])
    try:
        yield notes
    finally:
        _notes.reset(token)


def add_note(text: str) -> None:
    notes = _notes.get()
    if notes is not None and text not in notes:
        notes.append(text)
