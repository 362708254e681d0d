"""One label per example."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from image_runs import PIXELS, tiny_vit
from torch import nn

from thrifty.core.batches import Batch
from thrifty.data.images.digits import DigitEpochs
from thrifty.objectives.classification import Classification
from thrifty.training.evaluation import evaluate


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_scores_and_normalizers_equal_torch(smoothing: float) -> None:
    batch, objective = DigitEpochs("train", 16).at(3), Classification(label_smoothing=smoothing)
    prediction = objective.predict(model(), batch)
    logits = prediction.logits.detach().requires_grad_()
    expected = F.cross_entropy(logits, batch["labels"], reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    torch.testing.assert_close(objective.losses(prediction, batch), expected)
    torch.testing.assert_close(objective.scores(prediction, batch), logits.grad.norm(dim=1))
    torch.testing.assert_close(objective.normalizers(prediction, batch)[:, 0], logits.logsumexp(-1))
    assert objective.tokens(batch) == 16


def test_model_output_with_attribute_logits() -> None:
    batch, objective = DigitEpochs("train", 4).at(0), Classification()
    logits = model()(batch["inputs"])
    with_logits = lambda inputs: SimpleNamespace(logits=logits)  # noqa: E731
    assert torch.equal(objective.predict(with_logits, batch).logits, logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_that_sum_to_one(smoothing: float) -> None:
    batch, objective = DigitEpochs("train", 8).at(0), Classification(label_smoothing=smoothing)
    one, other = (F.one_hot(labels, 10).float() for labels in (batch["labels"], batch["labels"].roll(1)))
    shared = Batch({"inputs": batch["inputs"], "labels": 0.7 * one + 0.3 * other}, batch.weight)
    prediction = objective.predict(model(), shared)
    parts = [
        objective.losses(prediction, Batch({"labels": labels}, batch.weight))
        for labels in (batch["labels"], batch["labels"].roll(1))
    ]
    torch.testing.assert_close(objective.losses(prediction, shared), 0.7 * parts[0] + 0.3 * parts[1])
    logits = prediction.logits.detach().requires_grad_()
    F.cross_entropy(logits, shared["labels"], reduction="sum", label_smoothing=smoothing).backward()
    torch.testing.assert_close(objective.scores(prediction, shared), logits.grad.norm(dim=1))
    largest = objective.measures(prediction, shared)["accuracy"]
    assert torch.equal(largest, objective.measures(prediction, batch)["accuracy"])
    whole = Batch({"labels": one}, batch.weight)
    torch.testing.assert_close(objective.losses(prediction, whole), parts[0])


def test_accuracy_is_the_fraction_of_right_labels() -> None:
    batch, objective = DigitEpochs("train", 64).at(0), Classification()
    learner = model()
    right = (learner(batch["inputs"]).argmax(1) == batch["labels"]).float()
    prediction = objective.predict(learner, batch)
    assert torch.equal(objective.measures(prediction, batch)["accuracy"], right)
    halves = [batch.rows(0, 48), batch.rows(48, 64)]
    scores = evaluate(learner, objective, halves, torch.device("cpu"))
    assert scores["accuracy"] == pytest.approx(float(right.mean()))
    wanted = F.cross_entropy(learner(batch["inputs"]), batch["labels"]).detach()
    assert scores["loss"] == pytest.approx(float(wanted), rel=1e-6)
    assert list(evaluate(learner, objective, halves, torch.device("cpu"))) == ["loss", *objective.measured]


def test_vit_applies_its_head_to_pooled_hidden_states() -> None:
    vit, objective = tiny_vit(1), Classification()
    batch = Batch({"inputs": PIXELS, "labels": torch.tensor([1, 2])}, torch.ones(2) / 2)
    assert torch.equal(objective.predict(vit, batch).logits, vit.logits(PIXELS))


def test_two_hundred_steps_classify_the_test_digits() -> None:
    learner, objective, source = model(), Classification(), DigitEpochs("train", 64)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    for step in range(200):
        batch = source.at(step)
        (objective.losses(objective.predict(learner, batch), batch) * batch.weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    test = DigitEpochs("test", 497).at(0)
    right = (objective.predict(learner, test).logits.argmax(1) == test["labels"]).float().mean()
    assert right > 0.93


def test_only_accuracy_for_texts_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Classification().with_labels(("negative", "positive"))
    assert objective.metrics == ("accuracy", "f1_macro", "matthews", "f1")
    monkeypatch.setattr("thrifty.objectives.classification.HAS_SCORES", False)
    assert objective.metrics == ("accuracy",) and not objective.collected
