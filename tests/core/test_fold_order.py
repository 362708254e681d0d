"""Order in which techniques are applied. The order decides a run's results, so renames must not change it."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
from tiny_runs import plain_run

from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.core.technique import Technique

ORDER = Path(__file__).with_name("fold_order.txt")


def stages_and_names(ordered: list[Technique]) -> list[list[str]]:
    return [[technique.stage.label, technique.name] for technique in ordered]


def test_techniques_are_applied_in_the_recorded_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a line to the file for a new technique. Existing lines keep their order."""
    recorded = [line.split() for line in ORDER.read_text().splitlines()]
    every = [techniques.find(name)() for name in techniques.names()]
    random.Random(0).shuffle(every)
    composed: list[Technique] = []
    monkeypatch.setattr("thrifty.composition.compose.refuse_illegal", composed.extend)
    with suppress(UsageError):  # all techniques together cannot train
        compose(plain_run(), every, 1)
    assert stages_and_names(composed) == recorded
    assert stages_and_names([*Recipe("all", techniques=tuple(every)).techniques]) == recorded
