"""Every two techniques either go together, through a structural change and a resume, or are refused with a reason.

What goes together with a technique is tried with it several at once: a run of six covers five of its pairs. Where such
a run fails, or is refused, its pairs are tried one by one, so that what is named is a pair.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from rank_processes import in_a_group_of_one
from runs_for import RUNS, plain_for
from thrifty import techniques
from thrifty.core.compose import Composition, Plain, compose
from thrifty.core.errors import Refused, UsageError
from thrifty.core.technique import Technique
from tiny_runs import advance, assert_same, restored, run_through, snapshot, technique, with_optimizer

STEPS, SAVED = 4, 2
AT_ONCE = 6
NAMES = techniques.names()


@pytest.mark.parametrize("name", NAMES[:-1])
def test_it_trains_and_resumes_with_every_later_one_or_one_of_them_is_refused(name: str) -> None:
    for group in gathered(name):
        with surroundings(group):
            try_together(group)


def gathered(name: str) -> list[list[str]]:
    """The technique with each that comes after it in the catalogue and is not for other data; those in one group that
    nothing forbids to have at once."""
    groups: list[list[str]] = []
    for other in NAMES[NAMES.index(name) + 1 :]:
        if len({RUNS[each] for each in (name, other) if each in RUNS}) > 1:
            continue
        for group in groups:
            if len(group) < AT_ONCE and go_together(group, other):
                group.append(other)
                break
        else:
            groups.append([name, other])
    return groups


def go_together(group: list[str], other: str) -> bool:
    """Whether the other can join in: on the same data, able to work on that run, and refused by none."""
    run = made_for(*group)
    if run != made_for(group[0], other) or not all(works_alone(each, run) for each in (*group, other)):
        return False
    try:
        compose(plain_for(*group), chosen_of([*group, other]), STEPS)
    except UsageError:
        return False
    return True


def made_for(*names: str) -> str | None:
    """Which of these decides what data the run is of."""
    return next((name for name in names if name in RUNS), None)


@cache
def works_alone(name: str, run: str | None) -> bool:
    """Whether it does not refuse, by name, to work on the run that this one is for."""
    with surroundings([name]):
        try:
            run_through(plain_for(*([run] if run else [])), chosen_of([name]), 1)
        except Refused as refused:
            return name not in refused.what
    return True


def chosen_of(names: list[str]) -> list[Technique]:
    return with_optimizer([technique(name) for name in names])


@contextmanager
def surroundings(names: list[str]) -> Iterator[None]:
    if "compile" in names:
        torch._dynamo.reset()
    if any(name.startswith("parallelism.") for name in names):
        with in_a_group_of_one():  # several ranks: tests/techniques/test_parallelism.py
            yield
    else:
        yield


def try_together(group: list[str]) -> None:
    first, *others = group
    if len(others) == 1:
        return try_pair(first, *others)
    plain, chosen = plain_for(*group), chosen_of(group)
    try:
        train_and_resume(plain, chosen, compose(plain, chosen, STEPS))
    except Exception as failure:
        for other in others:
            try_pair(first, other)
        if not isinstance(failure, Refused):
            failure.add_note(f"in a run with {', '.join(group)}, though each goes with {first}")
            raise


def try_pair(*pair: str) -> None:
    try:
        goes_or_is_refused(list(pair))
    except Exception as failure:
        failure.add_note(" and ".join(pair))
        raise


def goes_or_is_refused(pair: list[str]) -> None:
    plain, chosen = plain_for(*pair), chosen_of(pair)
    try:
        run = compose(plain, chosen, STEPS)
    except UsageError as refused:
        assert all(name in refused.what for name in pair) or is_refused_by_itself(refused, pair)
        assert refused.fix
        return
    try:
        train_and_resume(plain, chosen, run)
    except Refused as refused:
        assert is_refused_by_itself(refused, pair)
        assert refused.fix


def is_refused_by_itself(refused: UsageError, pair: list[str]) -> bool:
    """Whether it is one of the pair that refuses, by name, to work on the run that the other one is for: alone too."""
    run = made_for(*pair)
    return any(name in refused.what and name not in RUNS and not works_alone(name, run) for name in pair)


def train_and_resume(plain: Plain, chosen: list[Technique], run: Composition) -> None:
    state = run.start()
    records = advance(run, state, SAVED)
    saved = snapshot(state)
    records += advance(run, state)
    assert len(records) == STEPS
    assert all(math.isfinite(record.loss) and not record.skipped for record in records)
    run.verify(state)

    again = compose(plain, chosen, STEPS)
    resumed = restored(again, saved)
    again.verify(resumed)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))
