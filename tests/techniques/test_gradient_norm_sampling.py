"""Sampling by gradient norms: unbiased, gated by tau."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.backward import Outcome
from thrifty.core.batches import Batch
from thrifty.core.compose import compose
from thrifty.core.errors import Refused
from thrifty.core.objective import Objective, Prediction
from thrifty.techniques.data_selection.gradient_norm_sampling import Sampler, draw, variance_reduction
from tiny_runs import advance, assert_same, plain_run, restored, snapshot, technique, with_optimizer


def test_tau_is_the_formula_and_one_for_equal_scores() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    share = [score / 16 for score in (1, 2, 3, 10)]
    assert float(variance_reduction(scores)) == pytest.approx(math.sqrt(4 * sum(g * g for g in share)))
    assert float(variance_reduction(torch.full((7,), 3.0))) == pytest.approx(1.0)
    assert float(variance_reduction(torch.tensor([0.0, 0.0, 0.0, 5.0]))) == pytest.approx(2.0)


def test_the_drawn_batch_has_the_expected_weighted_sum_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    values, scores = torch.randn(9, 3, generator=generator), torch.rand(9, generator=generator) + 0.1
    weight = torch.rand(9, generator=generator)
    batch = Batch({"value": values}, weight)
    torch.manual_seed(0)
    sums = []
    for _ in range(4000):
        drawn = draw(batch, scores, 3)
        assert len(drawn) == 3
        sums.append(drawn.weight @ drawn["value"])
    found = torch.stack(sums)
    error = found.std(0) / math.sqrt(len(sums))
    assert ((found.mean(0) - weight @ values).abs() < 4 * error).all()


def test_drawing_in_proportion_to_the_norm_has_less_variance_than_uniformly() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30, 1, generator=generator).exp()
    batch = Batch({"value": values}, torch.full((30,), 1 / 30))
    torch.manual_seed(0)
    by_norm, uniform = (
        torch.stack([(d := draw(batch, scores, 5)).weight @ d["value"] for _ in range(500)]).std()
        for scores in (values.squeeze(1), torch.ones(30))
    )
    assert by_norm < uniform / 5


def test_the_scores_are_the_norms_of_the_loss_gradient_at_the_logits() -> None:
    plain = plain_run()
    model, batch = plain.build(), plain.source.at(0)
    prediction = plain.objective.predict(model, batch)
    found = plain.objective.scores(prediction, batch)
    logits = model.head(model(batch["tokens"][:, :-1])).detach().double().requires_grad_(True)
    F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum").backward()
    assert logits.grad is not None
    torch.testing.assert_close(found.double(), logits.grad.flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6)


class Heard:
    """A backward pass that keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> Outcome:
        self.batches.append(batch)
        losses: Tensor = objective.losses(objective.predict(model, batch), batch)
        return Outcome((losses * batch.weight).sum().detach())


def test_the_gate_opens_when_tau_exceeds_what_scoring_costs() -> None:
    plain = plain_run(batch=12)
    inner = Heard()
    sampler = Sampler(inner, times=3, momentum=0.9)
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


def test_while_the_gate_is_closed_it_is_the_plain_run_of_every_third_batch() -> None:
    plain = plain_run()
    run = compose(plain, with_optimizer([technique("data_selection.gradient_norm_sampling")]), 3)
    assert torch.equal(run.source.at(2)["tokens"][:4], plain.source.at(6)["tokens"])
    state = run.start()
    run.backward(state.model, run.objective, run.source.at(2))  # type: ignore[arg-type]
    other = plain.build()
    loss = plain.objective.losses(plain.objective.predict(other, plain.source.at(6)), plain.source.at(6)).mean()
    loss.backward()
    assert state.model is not None
    for found, wanted in zip(state.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-7)


def test_an_open_gate_is_resumed_bit_for_bit() -> None:
    chosen = with_optimizer([technique("data_selection.gradient_norm_sampling"), technique("large_batch.accumulate")])
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


def test_a_step_without_finite_scores_leaves_the_gate_as_it_was() -> None:
    sampler = Sampler(lambda model, objective, batch: Outcome(objective.losses(None, batch).sum()), 2, 0.5)
    sampler.state["tau"].fill_(9.0)
    broken = ScoredAs(torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    batch = Batch({"tokens": torch.zeros(4, 3, dtype=torch.int64)}, torch.full((4,), 0.25))
    outcome = sampler(torch.nn.Identity(), broken, batch)
    assert outcome.notes["sampled"] == 0.0 and float(sampler.state["tau"]) == 9.0


def test_a_share_that_cannot_be_divided_is_refused() -> None:
    batch = Batch({"tokens": torch.zeros(5, 3, dtype=torch.int64)}, torch.full((5,), 0.2))
    with pytest.raises(Refused, match="not 3 times a whole number"):
        Sampler(lambda *_: Outcome(torch.zeros(())), 3, 0.9)(torch.nn.Identity(), ScoredAs(torch.ones(5)), batch)


class ScoredAs(Objective):
    """Scores given beforehand, for the examples in order."""

    def __init__(self, given: torch.Tensor):
        self.given = given

    def predict(self, model: torch.nn.Module, batch: Batch) -> Prediction:
        return Prediction()

    def scores(self, prediction: Prediction | None, batch: Batch) -> torch.Tensor:
        return self.given[: len(batch)]

    def losses(self, prediction: Prediction | None, batch: Batch) -> torch.Tensor:
        return torch.ones(len(batch))
