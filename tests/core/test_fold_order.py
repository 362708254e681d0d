"""The order in which techniques are folded decides a run's numbers: it stays as it was, whatever they are called."""

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


def test_all_techniques_are_folded_in_the_order_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new technique gets a line in the file, between those that keep theirs."""
    kept = [line.split() for line in ORDER.read_text().splitlines()]
    every = [techniques.find(name)() for name in techniques.names()]
    random.Random(0).shuffle(every)
    composed: list[Technique] = []
    monkeypatch.setattr("thrifty.composition.compose.refuse_illegal", composed.extend)
    with suppress(UsageError):  # all at once cannot train
        compose(plain_run(), every, 1)
    assert stages_and_names(composed) == kept
    assert stages_and_names([*Recipe("all", techniques=tuple(every)).techniques]) == kept
