"""Every two techniques either go together, through a structural change and a resume, or are refused with a reason."""

import itertools
import math

import pytest
import torch

from runs_for import plain_for
from thrifty import techniques
from thrifty.core.compose import compose
from thrifty.core.errors import UsageError
from tiny_runs import advance, assert_same, restored, snapshot, technique, with_optimizer

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
        assert all(name in refused.what for name in pair)
        assert refused.fix
        return
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
