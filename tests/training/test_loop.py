"""The training loop: seeds per step, steps without a finite gradient, records."""

import time

import pytest
import torch
from tiny_runs import Repeated, advance, plain_run, snapshot, technique
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.batches import Batch
from thrifty.core.errors import ThriftyError
from thrifty.core.objective import Prediction
from thrifty.objectives.next_token import NextToken
from thrifty.training.loop import PATIENCE, step_seed, train

STILL = technique("optimizers.adamw", lr=0.0)
SLOW = 0.05
"""Seconds of a slow batch."""


class Poisoned(NextToken):
    """An objective with nan losses for batches with an odd sum of tokens."""

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        return losses * float("nan") if int(batch["tokens"].sum()) % 2 else losses


def poisoned(repeated: bool = False) -> Run:
    plain = plain_run(depth=1)
    source = plain.source
    if repeated:
        odd = next(step for step in range(100) if int(source.at(step)["tokens"].sum()) % 2)
        first = source.at(odd)
        source = Repeated(source)
        source.rows = lambda step, start, stop: first.rows(start, stop)  # type: ignore[method-assign]
    return compose(BaseRun(plain.build, source, Poisoned()), [technique("optimizers.adamw")], 30)


def test_random_numbers_depend_on_the_step_only() -> None:
    values = []
    for _ in range(2):
        run = compose(plain_run(style="gpt", dropout=0.3, repeated=True), [STILL], 4)
        values.append([record.loss for record in advance(run, run.start())])
        torch.rand(7)
    assert values[0] == values[1]
    assert len(set(values[0])) == 4


def test_seeds_of_steps_and_ranks_are_distinct() -> None:
    seeds = {step_seed(seed, step, rank) for seed in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 5 * 50 * 4


def test_a_step_without_a_finite_gradient_changes_nothing() -> None:
    run = poisoned()
    state = run.start()
    skipped = 0
    for step in range(1, 9):
        before = snapshot(state)
        (record,) = advance(run, state, step)
        assert record.step == state.step == step
        assert state.optimizer is not None
        if record.skipped:
            skipped += 1
            after = snapshot(state)
            assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
        assert state.optimizer.updates == step - skipped
        assert state.counters["skipped"] == skipped
    assert 0 < skipped < 8


class NormalizedEmbedding(nn.Module):
    """An embedding with rows normalized over the batch; they are nan in the second step."""

    has_separate_head = True

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 256)
        self.passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        rows = self.table(tokens) * (float("nan") if self.passes == 2 else 1.0)
        return self.norm(rows.flatten(0, 1)).view_as(rows)


def test_a_skipped_step_restores_the_statistics_of_norms() -> None:
    plain = plain_run()
    run = compose(BaseRun(NormalizedEmbedding, plain.source, plain.objective), [STILL], 2)
    state = run.start()
    advance(run, state, 1)
    before = snapshot(state)
    (record,) = advance(run, state, 2)
    assert record.skipped and "buffers/norm.running_var" in before.tensors
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in snapshot(state).tensors.items())


def test_ten_skipped_steps_stop_the_run_with_a_fix() -> None:
    run = poisoned(repeated=True)
    state = run.start()
    with pytest.raises(ThriftyError, match=f"not finite in {PATIENCE} steps in a row") as error:
        advance(run, state)
    assert state.step == PATIENCE
    assert "lower the learning rate" in error.value.fix


def test_records_count_tokens_and_steps_from_one() -> None:
    run = compose(plain_run(batch=4), [STILL], 3)
    state = run.start()
    records = advance(run, state)
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.tokens for record in records] == [64, 64, 64]
    assert state.counters["tokens"] == 192
    assert all(record.seconds > 0 and record.gradient_norm > 0 for record in records)


class Slow(Repeated):
    def rows(self, step: int, start: int, stop: int) -> Batch:
        time.sleep(SLOW)
        return super().rows(step, start, stop)


def test_step_seconds_include_the_wait_for_its_batch() -> None:
    plain = plain_run(depth=1)
    run = compose(BaseRun(plain.build, Slow(plain.source), plain.objective), [STILL], 4)
    state, seconds = run.start(), []
    began = time.perf_counter()
    for record in train(run, state, seed=0):
        seconds.append(record.seconds)
        time.sleep(2 * SLOW)  # meanwhile two batches are prepared
    assert seconds[0] >= SLOW
    assert sum(seconds) == pytest.approx(state.counters["seconds"], abs=SLOW / 4)
    assert sum(seconds) <= time.perf_counter() - began - 4 * 2 * SLOW
