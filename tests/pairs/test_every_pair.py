"""Every two techniques either go together, through a structural change and a resume and in whatever order they are
given, or are refused with a reason.

What goes together is tried several at once: a run of eight covers 28 pairs. `make test` has a quarter of the pairs,
`make test-all` all of them. Where such a run fails, or is refused, its
pairs are tried one by one, so that what is named is a pair.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations

import pytest
import torch
from covering_arrays import Group, around, covering
from drawn_settings import fitting_settings
from rank_processes import in_a_group_of_one
from table_samples import sample_of, whole_tables
from technique_runs import RUNS, plain_for
from tiny_runs import advance, assert_same, composed, restored, run_through, snapshot, technique, with_optimizer

from thrifty import techniques
from thrifty.composition.compose import BaseRun, Run
from thrifty.core.errors import InfeasibleError, RefusedError, UsageError
from thrifty.core.technique import Technique

STEPS, SAVED = 4, 2
AT_ONCE = 8
SAMPLED = 8
NAMES = techniques.names()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" in metafunc.fixturenames:
        metafunc.parametrize("group", sampled_groups(), ids="+".join)
    if "drawn" in metafunc.fixturenames:
        metafunc.parametrize("drawn", sample_of(groups()[::3], 3), ids="+".join)


def test_they_train_and_resume_together(group: Group) -> None:
    with surroundings(group):
        try_together(group)


def test_they_train_and_resume_together_with_drawn_settings(drawn: Group) -> None:
    on, refusals = made_for(drawn), []
    plain, working = plain_run_for(on), [name for name in drawn if name in RUNS or works_alone(name, on)]
    for attempt in range(len(drawn)):  # each leaves one technique more at its usual settings
        settings = {
            name: fitting_settings(name, (drawn, attempt)) if i >= attempt else {} for i, name in enumerate(working)
        }
        with surroundings(drawn):
            try:
                chosen = with_optimizer([technique(name, **settings[name]) for name in working])
                train_and_resume(plain, chosen, composed(plain, chosen, STEPS))
                return
            except (UsageError, InfeasibleError) as refused:
                assert refused.fix, settings
                refusals.append(f"{settings}: {refused.what}")
            except Exception as failure:
                failure.add_note(f"with {settings}")
                raise
    pytest.fail("all that was drawn is refused: " + "; ".join(refusals))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_cannot_be_composed_with_is_refused_with_a_reason(name: str) -> None:
    for other in NAMES:
        if other != name and same_data((name, other)) and not compose_together((name, other)):
            try_pair((name, other))


def test_every_two_meet_in_a_run_or_cannot_be_composed() -> None:
    met = {frozenset(pair) for group in groups() for pair in pairs_of(group)}
    for pair in combinations(NAMES, 2):
        assert frozenset(pair) in met or not compose_together(pair), pair


@cache
def groups() -> list[Group]:
    """Every two that are for the same data and that nothing forbids to have at once are in one of these."""
    found = covering([name for name in NAMES if name not in RUNS], compose_together, AT_ONCE)
    for number, name in enumerate(RUNS):  # on its own data, where others may refuse to work: its pairs only
        found += around(
            name, [other for other in NAMES if other not in list(RUNS)[: number + 1]], compose_together, AT_ONCE
        )
    return found


def sampled_groups() -> list[Group]:
    """The first groups of the array, in which new pairs are most, and one for each kind of data, nothing compiled
    there; with --all every group."""
    if whole_tables():
        return groups()
    first = [group for group in groups() if group[0] not in RUNS][:SAMPLED]
    return first + [next(g for g in groups() if g[0] == name and "compile" not in g) for name in RUNS]


def pairs_of(group: Group) -> list[Group]:
    """The pairs that a run of this group is for."""
    first, *others = group
    return [(first, other) for other in others] if first in RUNS else list(combinations(group, 2))


def same_data(group: Group) -> bool:
    return len({RUNS[name] for name in group if name in RUNS}) < 2


def compose_together(group: Group) -> bool:
    if not same_data(group):
        return False
    try:
        composed(plain_run_for(made_for(group)), chosen_of(group), STEPS)
    except Exception:  # a refusal; what else may fail is told by the test that asks for the reason
        return False
    return True


def made_for(group: Group) -> str | None:
    """Which of these decides what data the run is of."""
    return next((name for name in group if name in RUNS), None)


@cache
def plain_run_for(name: str | None) -> BaseRun:
    return plain_for(*([name] if name else []))


@cache
def works_alone(name: str, on: str | None) -> bool:
    """Whether it does not refuse, by name, to work on the run that this one is for."""
    with surroundings((name,)):
        try:
            run_through(plain_run_for(on), chosen_of((name,)), 1)
        except RefusedError as refused:
            return name not in refused.what
    return True


def chosen_of(group: Group) -> list[Technique]:
    return with_optimizer([technique(name) for name in group])


@contextmanager
def surroundings(group: Group) -> Iterator[None]:
    if "compile" in group:
        torch._dynamo.reset()
    if any(name.startswith("parallelism.") for name in group):
        with in_a_group_of_one():  # several ranks: tests/techniques/test_parallelism.py
            yield
    else:
        yield


def try_together(group: Group) -> None:
    if len(group) == 2:
        return try_pair(group)
    plain, chosen = plain_run_for(made_for(group)), chosen_of(group)
    try:
        train_and_resume(plain, chosen, composed(plain, chosen, STEPS))
    except Exception as failure:
        if isinstance(failure, RefusedError) and (name := refusing_by_itself(failure, group)):
            try_pair((group[0], name))
            return try_together(tuple(other for other in group if other != name))
        for pair in pairs_of(group):
            try_pair(pair)
        if not isinstance(failure, RefusedError):
            failure.add_note(f"in a run of {', '.join(group)}, though each two of them go together")
            raise


def try_pair(pair: Group) -> None:
    try:
        goes_or_is_refused(pair)
    except Exception as failure:
        failure.add_note(" and ".join(pair))
        raise


def goes_or_is_refused(pair: Group) -> None:
    plain, chosen = plain_run_for(made_for(pair)), chosen_of(pair)
    try:
        run = composed(plain, chosen, STEPS)
    except UsageError as refused:
        assert all(name in refused.what for name in pair) or refusing_by_itself(refused, pair)
        assert refused.fix
        return
    try:
        train_and_resume(plain, chosen, run)
    except RefusedError as refused:
        assert refusing_by_itself(refused, pair)
        assert refused.fix


def refusing_by_itself(refused: UsageError, group: Group) -> str | None:
    """Which one of the group refuses, by name, to work on the run that another one is for: alone too."""
    on = made_for(group)
    return next((n for n in group if n in refused.what and n not in RUNS and not works_alone(n, on)), None)


def train_and_resume(plain: BaseRun, chosen: list[Technique], run: Run) -> None:
    state = run.start()
    records = advance(run, state, SAVED)
    saved = snapshot(state)
    records += advance(run, state)
    assert len(records) == STEPS
    assert all(math.isfinite(record.loss) and not record.skipped for record in records)
    run.verify(state)

    again = composed(plain, chosen[::-1], STEPS)
    resumed = restored(again, saved)
    again.verify(resumed)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))
