"""Every pair of techniques trains together, through a structural change and a resume, or is refused with a reason.

Several techniques are tried at once: a run of eight covers 28 pairs. `make test` runs a quarter of the pairs,
`make test-all` all of them. If a run fails or is refused, its pairs are tried one by one to name the pair.
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
GROUP_SIZE = 8
SAMPLED = 8
NAMES = techniques.names()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" in metafunc.fixturenames:
        metafunc.parametrize("group", sampled_groups(), ids="+".join)
    if "random_group" in metafunc.fixturenames:
        metafunc.parametrize("random_group", sample_of(groups()[::3], 3), ids="+".join)


def test_group_trains_and_resumes(group: Group) -> None:
    with environment(group):
        try_together(group)


def test_group_with_random_settings_trains_and_resumes(random_group: Group) -> None:
    on, refusals = data_owner(random_group), []
    plain, working = plain_run_for(on), [name for name in random_group if name in RUNS or works_on_data(name, on)]
    for attempt in range(len(random_group)):  # each attempt leaves one more technique at its defaults
        settings = {
            name: fitting_settings(name, (random_group, attempt)) if i >= attempt else {}
            for i, name in enumerate(working)
        }
        with environment(random_group):
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
    pytest.fail("all random settings are refused: " + "; ".join(refusals))


@pytest.mark.parametrize("name", NAMES)
def test_incompatible_pairs_are_refused_with_a_reason(name: str) -> None:
    for other in NAMES:
        if other != name and same_data((name, other)) and not compose_together((name, other)):
            try_pair((name, other))


def test_every_pair_is_in_a_group_or_cannot_be_composed() -> None:
    covered = {frozenset(pair) for group in groups() for pair in pairs_of(group)}
    for pair in combinations(NAMES, 2):
        assert frozenset(pair) in covered or not compose_together(pair), pair


@cache
def groups() -> list[Group]:
    """Return groups that contain every pair with the same data that can be composed."""
    arrays = covering([name for name in NAMES if name not in RUNS], compose_together, GROUP_SIZE)
    for number, name in enumerate(RUNS):  # on its own data, where others may refuse to run: its pairs only
        arrays += around(
            name, [other for other in NAMES if other not in list(RUNS)[: number + 1]], compose_together, GROUP_SIZE
        )
    return arrays


def sampled_groups() -> list[Group]:
    """Return the first groups of the array, with most new pairs, and one for each kind of data without `compile`.

    With --all, return every group.
    """
    if whole_tables():
        return groups()
    first = [group for group in groups() if group[0] not in RUNS][:SAMPLED]
    return first + [next(g for g in groups() if g[0] == name and "compile" not in g) for name in RUNS]


def pairs_of(group: Group) -> list[Group]:
    """Return the pairs that a run of this group tests."""
    first, *others = group
    return [(first, other) for other in others] if first in RUNS else list(combinations(group, 2))


def same_data(group: Group) -> bool:
    return len({RUNS[name] for name in group if name in RUNS}) < 2


def compose_together(group: Group) -> bool:
    if not same_data(group):
        return False
    try:
        composed(plain_run_for(data_owner(group)), chosen_of(group), STEPS)
    except Exception:  # a refusal; the test of refusals reports other failures
        return False
    return True


def data_owner(group: Group) -> str | None:
    """Return the technique of a group that determines the run's data, or None."""
    return next((name for name in group if name in RUNS), None)


@cache
def plain_run_for(name: str | None) -> BaseRun:
    return plain_for(*([name] if name else []))


@cache
def works_on_data(name: str, on: str | None) -> bool:
    """Return False if the technique refuses, by name, to run on the data of technique `on`."""
    with environment((name,)):
        try:
            run_through(plain_run_for(on), chosen_of((name,)), 1)
        except RefusedError as refused:
            return name not in refused.what
    return True


def chosen_of(group: Group) -> list[Technique]:
    return with_optimizer([technique(name) for name in group])


@contextmanager
def environment(group: Group) -> Iterator[None]:
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
    plain, chosen = plain_run_for(data_owner(group)), chosen_of(group)
    try:
        train_and_resume(plain, chosen, composed(plain, chosen, STEPS))
    except Exception as failure:
        if isinstance(failure, RefusedError) and (name := refused_alone(failure, group)):
            try_pair((group[0], name))
            return try_together(tuple(other for other in group if other != name))
        for pair in pairs_of(group):
            try_pair(pair)
        if not isinstance(failure, RefusedError):
            failure.add_note(f"in a run of {', '.join(group)}, though each pair of them trains together")
            raise


def try_pair(pair: Group) -> None:
    try:
        check_pair(pair)
    except Exception as failure:
        failure.add_note(" and ".join(pair))
        raise


def check_pair(pair: Group) -> None:
    plain, chosen = plain_run_for(data_owner(pair)), chosen_of(pair)
    try:
        run = composed(plain, chosen, STEPS)
    except UsageError as refused:
        assert all(name in refused.what for name in pair) or refused_alone(refused, pair)
        assert refused.fix
        return
    try:
        train_and_resume(plain, chosen, run)
    except RefusedError as refused:
        assert refused_alone(refused, pair)
        assert refused.fix


def refused_alone(refused: UsageError, group: Group) -> str | None:
    """Return the member that refuses, by name, the data of another member, also without the rest; or None."""
    on = data_owner(group)
    return next((n for n in group if n in refused.what and n not in RUNS and not works_on_data(n, on)), None)


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
