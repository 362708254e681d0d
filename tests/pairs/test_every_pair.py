"""Every two techniques either go together, through a structural change and a resume, or are refused with a reason."""

import itertools
import math

import pytest
import torch

from runs_for import RUNS, plain_for
from thrifty import techniques
from thrifty.core.compose import Composition, Plain, compose
from thrifty.core.errors import Refused, UsageError
from thrifty.core.technique import Technique
from tiny_runs import advance, assert_same, restored, run_through, snapshot, technique, with_optimizer

STEPS, SAVED = 4, 2


@pytest.fixture(params=itertools.combinations(techniques.names(), 2), ids=" and ".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    if any(name.startswith("parallelism.") for name in request.param):
        request.getfixturevalue("one_rank")  # several ranks: tests/techniques/test_parallelism.py
    if "compile" in request.param:
        torch._dynamo.reset()
    return request.param


def test_every_pair_trains_and_resumes_or_is_refused(pair: tuple[str, str]) -> None:
    plain, chosen = plain_for(*pair), with_optimizer([technique(name) for name in pair])
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


def is_refused_by_itself(refused: UsageError, pair: tuple[str, str]) -> bool:
    """Whether it is one of the pair that refuses, by name, to work on the run that the other one is for: alone too."""
    return any(name in refused.what and name not in RUNS and cannot_work_alone(name, pair) for name in pair)


def cannot_work_alone(name: str, pair: tuple[str, str]) -> bool:
    try:
        run_through(plain_for(*pair), with_optimizer([technique(name)]), 1)
    except Refused as refused:
        return name in refused.what
    return False


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
