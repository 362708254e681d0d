"""Labels of whole examples."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.data.digits import Digits
from thrifty.objectives.classify import Classify


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_scores_and_normalizers_are_those_of_torch(smoothing: float) -> None:
    batch, objective = Digits("train", 16).at(3), Classify(label_smoothing=smoothing)
    prediction = objective.predict(model(), batch)
    logits = prediction.logits.detach().requires_grad_()
    expected = F.cross_entropy(logits, batch["labels"], reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    torch.testing.assert_close(objective.losses(prediction, batch), expected)
    torch.testing.assert_close(objective.scores(prediction, batch), logits.grad.norm(dim=1))
    torch.testing.assert_close(objective.normalizers(prediction, batch)[:, 0], logits.logsumexp(-1))
    assert objective.tokens(batch) == 16


def test_a_model_that_answers_with_an_attribute_logits_is_understood() -> None:
    batch, objective = Digits("train", 4).at(0), Classify()
    logits = model()(batch["inputs"])
    answering = lambda inputs: SimpleNamespace(logits=logits)  # noqa: E731
    assert torch.equal(objective.predict(answering, batch).logits, logits)


def test_two_hundred_steps_read_the_digits_of_the_test_split() -> None:
    learner, objective, source = model(), Classify(), Digits("train", 64)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    for step in range(200):
        batch = source.at(step)
        (objective.losses(objective.predict(learner, batch), batch) * batch.weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    test = Digits("test", 497).at(0)
    right = (objective.predict(learner, test).logits.argmax(1) == test["labels"]).float().mean()
    assert right > 0.93


def test_text_has_no_labels() -> None:
    with pytest.raises(UsageError, match="needs labels, and the data has only tokens"):
        Classify().examples(Batch({"tokens": torch.zeros(2, 3)}, torch.ones(2)))
    labelled = Digits("train", 2).at(0)
    assert Classify().examples(labelled) is labelled
