"""Sampling by gradient norms: unbiased, active by tau."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from image_runs import image_run
from rank_processes import on_ranks
from sampling_work import NAME, ScoredAs, sample_with_nan_on_one_rank, sampled_runs
from technique_runs import plain_for
from tiny_runs import advance, assert_same, plain_run, restored, run_through, snapshot, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.backward import BackwardResult
from thrifty.core.batches import Batch, BatchSource, RankShard
from thrifty.core.errors import InfeasibleError, RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.recipe import Budget
from thrifty.objectives.user_loss import UserLoss
from thrifty.recipes import RECIPES
from thrifty.techniques.data_selection.gradient_norm_sampling import (
    GradientNormBackward,
    LossFunctionScores,
    probabilities,
    sample,
    variance_reduction,
    weighted_scores,
)
from thrifty.training.run_setup import prepare_run


def test_tau_equals_the_formula() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    share = [score / 16 for score in (1, 2, 3, 10)]
    assert float(variance_reduction(scores)) == pytest.approx(math.sqrt(4 * sum(g * g for g in share)))
    assert float(variance_reduction(torch.full((7,), 3.0))) == pytest.approx(1.0)
    assert float(variance_reduction(torch.tensor([0.0, 0.0, 0.0, 5.0]))) == pytest.approx(2.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_tau_is_at_least_one_and_one_only_for_equal_scores(values: list[float]) -> None:
    scores = torch.tensor(values, dtype=torch.float64)
    tau = float(variance_reduction(scores))
    assert tau >= 1 - 1e-12 and tau <= math.sqrt(len(values)) + 1e-9
    if max(values) > 1.01 * min(values):
        assert tau > 1 + 1e-8
    else:
        assert tau == pytest.approx(1, abs=1e-4)
    g = scores / scores.sum()
    u = torch.full_like(g, 1 / len(g))
    assert 1 / tau**2 == pytest.approx(float(1 - (g - u).square().sum() / g.square().sum()), rel=1e-6, abs=1e-9)


def expectation(batch: Batch, scores: Tensor, count: int, of: str, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Return the mean and mean square of the sampled weighted sum, over all possible samples."""
    probability = probabilities(scores)
    first, second = 0.0, 0.0
    for rows in itertools.product(range(len(batch)), repeat=count):
        taken = torch.tensor(rows)
        monkeypatch.setattr(torch, "multinomial", lambda *_, taken=taken, **__: taken)
        drawn = sample(batch, scores, count)
        chance, actual = float(probability[taken].prod()), drawn.weight @ drawn[of]
        if chance > 0:
            first, second = first + chance * actual, second + chance * actual.square().sum()
    return first, second


def test_the_expected_sampled_gradient_is_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    values, weight = (torch.randn(5, 3, generator=generator).double(), torch.rand(5, generator=generator).double())
    values[2] = 0  # an example with a zero score is never sampled, without bias
    scores = (torch.rand(5, generator=generator) + 0.1).double() * values.norm(dim=1).sign()
    mean, _ = expectation(Batch({"value": values}, weight), scores, 2, "value", monkeypatch)
    torch.testing.assert_close(mean, weight @ values)


def test_the_variance_of_single_samples_falls_by_tau_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([0.1, 0.3, 0.5, 4.0, 0.2], dtype=torch.float64)[:, None]
    batch, norms = Batch({"value": values}, torch.full((5,), 0.2, dtype=torch.float64)), values.squeeze(1)
    _, uniform = expectation(batch, torch.ones(5, dtype=torch.float64), 1, "value", monkeypatch)
    _, by_norm = expectation(batch, norms, 1, "value", monkeypatch)
    assert float(uniform / by_norm) == pytest.approx(float(variance_reduction(norms)) ** 2)


def test_zero_scores_sample_uniformly() -> None:
    assert probabilities(torch.zeros(4)).tolist() == [0.25] * 4


def test_the_expected_weighted_sum_is_that_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    values, scores = torch.randn(9, 3, generator=generator), torch.rand(9, generator=generator) + 0.1
    weight = torch.rand(9, generator=generator)
    batch = Batch({"value": values}, weight)
    torch.manual_seed(0)
    sums = []
    for _ in range(4000):
        drawn = sample(batch, scores, 3)
        assert len(drawn) == 3
        sums.append(drawn.weight @ drawn["value"])
    actual = torch.stack(sums)
    error = actual.std(0) / math.sqrt(len(sums))
    assert ((actual.mean(0) - weight @ values).abs() < 4 * error).all()


def test_sampling_by_norm_has_less_variance_than_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30, 1, generator=generator).exp()
    batch = Batch({"value": values}, torch.full((30,), 1 / 30))
    torch.manual_seed(0)
    by_norm, uniform = (
        torch.stack([(d := sample(batch, scores, 5)).weight @ d["value"] for _ in range(500)]).std()
        for scores in (values.squeeze(1), torch.ones(30))
    )
    assert by_norm < uniform / 5


def test_scores_equal_norms_of_the_logit_gradient() -> None:
    plain = plain_run()
    model, batch = plain.build(), plain.source.at(0)
    prediction = plain.objective.predict(model, batch)
    actual = plain.objective.scores(prediction, batch)
    logits = model.head(model(batch["tokens"][:, :-1])).detach().double().requires_grad_(True)
    F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum").backward()
    assert logits.grad is not None
    torch.testing.assert_close(actual.double(), logits.grad.flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6)


class RecordingBackward:
    """A backward pass that records its arguments."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        self.batches.append(batch)
        losses: Tensor = objective.losses(objective.predict(model, batch), batch)
        return BackwardResult((losses * batch.weight).sum().detach())


def test_sampling_starts_when_tau_exceeds_the_cost() -> None:
    plain = plain_run(batch=12)
    inner = RecordingBackward()
    sampler = GradientNormBackward(inner, times=3, momentum=0.9)
    assert sampler.threshold == 2.0  # 12 examples scored and 4 trained on cost as much as 8 trained on
    model, batch = plain.build(), plain.source.at(0)
    closed = sampler(model, plain.objective, batch)
    assert closed.notes["sampled"] == 0.0
    assert torch.equal(inner.batches[0]["tokens"], batch["tokens"][:4])
    assert float(inner.batches[0].weight.sum()) == pytest.approx(1.0)
    assert 0.1 <= closed.notes["tau"] < 0.2  # one tenth of a tau near 1
    sampler.state["tau"].fill_(2.01)
    opened = sampler(model, plain.objective, batch)
    assert opened.notes["sampled"] == 1.0 and len(inner.batches[1]) == 4
    rows = {tuple(row) for row in batch["tokens"].tolist()}
    assert all(tuple(row) in rows for row in inner.batches[1]["tokens"].tolist())


def test_inactive_sampling_normalizes_weights_of_trained_rows() -> None:
    plain, inner = plain_run(batch=12), RecordingBackward()
    amounts = torch.arange(1.0, 13.0)
    batch = plain.source.at(0).weighted(amounts / amounts.sum())
    GradientNormBackward(inner, times=3, momentum=0.9)(plain.build(), plain.objective, batch)
    torch.testing.assert_close(inner.batches[0].weight, amounts[:4] / amounts[:4].sum())


def test_inactive_sampling_equals_a_plain_run() -> None:
    plain = plain_run()
    run = compose(plain, with_optimizer([technique("data_selection.gradient_norm_sampling")]), 3)
    assert torch.equal(run.source.at(2)["tokens"][:4], plain.source.at(6)["tokens"])
    state = run.start()
    run.backward(state.model, run.objective, run.source.at(2))  # type: ignore[arg-type]
    other = plain.build()
    loss = plain.objective.losses(plain.objective.predict(other, plain.source.at(6)), plain.source.at(6)).mean()
    loss.backward()
    assert state.model is not None
    for actual, expected in zip(state.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-7)


def test_resume_of_active_sampling_is_bit_identical() -> None:
    chosen = with_optimizer(
        [technique("data_selection.gradient_norm_sampling"), technique("large_batch.gradient_accumulation")]
    )
    run = compose(plain_run(), chosen, 4)
    state = run.start()
    state.techniques["data_selection.gradient_norm_sampling"]["tau"].fill_(100.0)
    records = advance(run, state, 2)
    saved = snapshot(state)
    records += advance(run, state)
    assert all(record.notes["sampled"] == 1.0 for record in records)
    again = compose(plain_run(), chosen, 4)
    resumed = restored(again, saved)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))


def test_a_step_without_finite_scores_keeps_tau() -> None:
    sampler = GradientNormBackward(
        lambda model, objective, batch: BackwardResult(objective.losses(None, batch).sum()), 2, 0.5
    )
    sampler.state["tau"].fill_(9.0)
    broken = ScoredAs(torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    batch = Batch({"tokens": torch.zeros(4, 3, dtype=torch.int64)}, torch.full((4,), 0.25))
    outcome = sampler(torch.nn.Identity(), broken, batch)
    assert outcome.notes["sampled"] == 0.0 and float(sampler.state["tau"]) == 9.0


def test_an_indivisible_batch_is_refused() -> None:
    batch = Batch({"tokens": torch.zeros(5, 3, dtype=torch.int64)}, torch.full((5,), 0.2))
    with pytest.raises(RefusedError, match="not a multiple of presample = 3"):
        GradientNormBackward(lambda *_: BackwardResult(torch.zeros(())), 3, 0.9)(
            torch.nn.Identity(), ScoredAs(torch.ones(5)), batch
        )


def dropped(seed: int = 0) -> tuple[nn.Module, Objective, Batch]:
    plain = plain_run(batch=6, style="gpt", dropout=0.3)
    return plain.build().train(), plain.objective, plain.source.at(seed)


def test_scoring_has_no_dropout_and_no_side_effects() -> None:
    model, objective, batch = dropped()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    actual = weighted_scores(model, objective, batch, 6)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    model.eval()
    expected = batch.weight * objective.scores(objective.predict(model, batch), batch)
    assert torch.equal(actual, expected)


def test_scores_do_not_depend_on_the_scoring_batch() -> None:
    model, objective, batch = dropped()
    whole = weighted_scores(model, objective, batch, 6)
    for at_once in (1, 4):
        torch.testing.assert_close(weighted_scores(model, objective, batch, at_once), whole, rtol=1e-5, atol=1e-7)


class RecordingObjective(WrappedObjective):
    """An objective that records the sizes of predicted batches, and whether gradients are enabled."""

    def __init__(self, inner: Objective):
        super().__init__(inner)
        self.seen: list[tuple[int, bool]] = []

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.seen.append((len(batch), torch.is_grad_enabled()))
        return super().predict(model, batch)


def test_accumulation_scores_and_trains_in_micro_batches() -> None:
    actual = []
    for parts, at_once, sizes in ((1, 0, [(4, False)] * 3 + [(4, True)]), (2, 2, [(2, False)] * 6 + [(2, True)] * 2)):
        chosen = [
            technique(NAME, scoring_batch=at_once),
            technique("large_batch.gradient_accumulation", micro_batches=parts),
        ]
        run = compose(plain_run(), with_optimizer(chosen), 3)
        state, seeing = run.start(), RecordingObjective(run.objective)
        run.memories[NAME]["tau"].fill_(100.0)
        torch.manual_seed(0)
        outcome = run.backward(state.model, seeing, run.source.at(0))  # type: ignore[arg-type]
        assert outcome.notes["sampled"] == 1.0 and seeing.seen == sizes
        assert state.model is not None
        actual.append([parameter.grad for parameter in state.model.parameters()])
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_weight_acts_like_a_score() -> None:
    model, objective, batch = dropped()
    model.eval()
    uneven = batch.weighted(torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]))
    ratio = weighted_scores(model, objective, uneven, 6) / weighted_scores(model, objective, batch, 6)
    torch.testing.assert_close(ratio, uneven.weight / batch.weight)


def test_a_handled_overflow_stays_handled() -> None:
    batch = Batch({"tokens": torch.zeros(4, 3, dtype=torch.int64)}, torch.full((4,), 0.25))

    def overflowing(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        return BackwardResult((objective.losses(Prediction(), batch) * batch.weight).sum(), overflow_handled=True)

    assert GradientNormBackward(overflowing, 2, 0.9)(nn.Identity(), ScoredAs(torch.ones(4)), batch).overflow_handled


class Contrasting(ScoredAs):
    joint = True


def test_losses_across_examples_are_refused() -> None:
    with pytest.raises(RefusedError, match="the loss of Contrasting compares several examples"):
        technique(NAME).objective(WrappedObjective(Contrasting(torch.ones(2))))


def test_an_objective_without_scores_is_refused() -> None:
    with pytest.raises(RefusedError, match="Objective does not implement gradient-norm scores"):
        technique(NAME).objective(WrappedObjective(Objective()))


def test_active_sampling_follows_a_growing_batch() -> None:
    chosen = [technique(NAME), technique("large_batch.batch_ramp", start=0.25, until=4, multiple=2)]
    run = compose(plain_run(batch=8), with_optimizer(chosen), 6)
    state, heard = run.start(), RecordingBackward()
    sampler = GradientNormBackward(heard, times=3, momentum=0.9)
    assert state.model is not None
    for step in (0, 3, 5):
        sampler.state["tau"].fill_(100.0)
        assert sampler(state.model, run.objective, run.source.at(step)).notes["sampled"] == 1.0
    assert [len(batch) for batch in heard.batches] == [2, 4, 8]


def test_ranks_together_expect_the_whole_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = plain_run(batch=6).source
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 2, generator=generator).double()
    scores = torch.rand(6, generator=generator).double()
    whole = Batch({"value": values, "row": torch.arange(6)}, source.at(0).weight.double())
    total = torch.zeros(2, dtype=torch.float64)
    for rank in (0, 1):
        share = RankShard(FixedSource(whole), rank, 2).at(0)
        mean, _ = expectation(share, scores[share["row"]], 2, "value", monkeypatch)
        total = total + mean
    torch.testing.assert_close(total, whole.weight @ values)


class FixedSource(BatchSource):
    """The same examples at every step."""

    def __init__(self, batch: Batch):
        self.given, self.batch = batch, len(batch)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.given.rows(start, stop)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "other",
    [
        "adapters.prompt_tuning",
        "compile",
        "data_selection.drop_patches",
        "growth.layer_drop",
        "curriculum.sequence_length",
        "measure.noise_scale",
        "memory.compress_activations",
        "memory.recompute",
        "precision.mixed",
        "sparsity.rigl",
    ],
)
def test_active_sampling_combines_with_other_techniques(other: str) -> None:
    torch._dynamo.reset()
    run = compose(plain_for(NAME, other), with_optimizer([technique(NAME), technique(other)]), 3)
    state = run.start()
    state.techniques[NAME]["tau"].fill_(100.0)
    records = advance(run, state)
    assert all(record.notes["sampled"] == 1.0 and math.isfinite(record.loss) for record in records)


@pytest.mark.parametrize("strategy", ["parallelism.replicate", "parallelism.shard"])
def test_all_ranks_start_sampling_together(strategy: str) -> None:
    alone, _ = run_through(plain_run(), with_optimizer([technique(NAME)]), 3)
    closed, opened = zip(*on_ranks(2, sampled_runs, strategy), strict=True)
    for records in closed:
        assert [tau for tau, _ in records] == pytest.approx([record.notes["tau"] for record in alone], rel=1e-4)
    assert closed[0] == closed[1] and opened[0] == opened[1]
    assert all(sampled for _, sampled in opened[0]) and not any(sampled for _, sampled in closed[0])


def test_a_nan_score_on_one_rank_stops_sampling_on_both() -> None:
    assert on_ranks(2, sample_with_nan_on_one_rank) == [(0.0, 9.0), (0.0, 9.0)]


def test_a_token_budget_counts_scored_examples() -> None:
    recipe = replace(RECIPES["vit-digits"](), budget=Budget(tokens=400.0), device="cpu")
    sampling = replace(recipe, techniques=(*recipe.techniques, technique(NAME)))
    assert prepare_run(recipe, quiet=True).run.steps == 6
    assert prepare_run(sampling, quiet=True).run.steps == 2
    with pytest.raises(InfeasibleError, match="is less than one step of 192"):
        prepare_run(replace(sampling, budget=Budget(tokens=100.0)), quiet=True)


def own_losses(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model.logits(rows["inputs"]), rows["labels"], reduction="none")


@pytest.mark.parametrize("recorded", [False, True])
def test_scores_of_a_loss_function_equal_those_of_the_objective(recorded: bool) -> None:
    plain = image_run(batch=6)
    model, batch = plain.build(), plain.objective.examples(plain.source.at(0))
    own = LossFunctionScores(UserLoss(own_losses, lambda batch: dict(batch.fields)))
    with torch.set_grad_enabled(recorded):
        expected = plain.objective.scores(plain.objective.predict(model, batch), batch)
        actual = own.scores(own.predict(model, batch), batch)
        assert torch.is_grad_enabled() == recorded
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-6)
    assert not model.head._forward_hooks and all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_function_is_sampled() -> None:
    plain = image_run(batch=6)
    objective = UserLoss(own_losses, lambda batch: dict(batch.fields))
    sampling = technique(NAME, presample=2, momentum=0.0)
    records, _ = run_through(BaseRun(plain.build, plain.source, objective), with_optimizer([sampling]), 4)
    assert all(math.isfinite(record.loss) and "tau" in record.notes for record in records)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda model, rows: own_losses(model, rows).mean(), "no loss of each example"),
        (lambda model, rows: own_losses(model, rows) + own_losses(model, rows), "output layer 2 times"),
    ],
)
def test_loss_functions_without_scores_are_refused(loss: Any, what: str) -> None:
    plain = image_run(batch=6)
    own = LossFunctionScores(UserLoss(loss, lambda batch: dict(batch.fields)))
    batch = plain.source.at(0)
    with pytest.raises(RefusedError, match=what):
        own.scores(own.predict(plain.build(), batch), batch)
