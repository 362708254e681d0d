"""Notes that techniques write for `explain` while they change a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("surgery notes", default=None)


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """Yield the list of notes that `add_note` appends inside the block."""
    token = _notes.set(notes := [])
    try:
        yield notes
    finally:
        _notes.reset(token)


def add_note(text: str) -> None:
    """Append a note once to the list of the open `collect_notes` block, if there is one."""
    notes = _notes.get()
    if notes is not None and text not in notes:
        notes.append(text)
