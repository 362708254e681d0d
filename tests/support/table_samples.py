"""Large tables of cases: `make test` runs a sample of each, `make test-all` all of it.

A test says how many of its cases are the sample: `@pytest.mark.sampled(4)`.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

Entry = TypeVar("Entry")
GOLDEN = (5**0.5 - 1) / 2


def whole_tables() -> bool:
    return "THRIFTY_TEST_ALL" in os.environ


def sample_of(table: Iterable[Entry], count: int) -> list[Entry]:
    """Return `count` entries, the first and one of each equal part, or with `pytest --all` every entry.

    Places within the parts differ, so that of a product of tables each factor is sampled.
    """
    entries = list(table)
    if whole_tables() or len(entries) <= count:
        return entries
    places = (number + number * GOLDEN % 1 for number in range(count))
    return [entries[int(place * len(entries) / count)] for place in places]


def outside_of_samples(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that a test leaves to `make test-all`."""
    cases = defaultdict[tuple[object, str], list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    kept: set[pytest.Item] = set()
    for table in cases.values():
        (count,) = table[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept.update(sample_of(table, count))
    return [item for table in cases.values() for item in table if item not in kept]
