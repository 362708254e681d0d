"""Large tables of cases: `make test` runs a sample of each, `make test-all` all of it."""

import os
from collections.abc import Iterable
from typing import TypeVar

Entry = TypeVar("Entry")


def whole_tables() -> bool:
    return "THRIFTY_TEST_ALL" in os.environ


def sample_of(table: Iterable[Entry], count: int) -> list[Entry]:
    """Return `count` entries, spread evenly, or with `pytest --all` every entry."""
    entries = list(table)
    if whole_tables() or len(entries) <= count:
        return entries
    return [entries[number * len(entries) // count] for number in range(count)]
