"""Losses that compare all examples of a batch: the gradient of the whole batch in micro-batches and on ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from two_towers import LOSSES, Pairs, each, embeddings, gradient_on_ranks, mean, mean_of_batch, pairs, two_towers

import thrifty
from thrifty.core.backward import plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError
from thrifty.objectives.embedding_loss import EmbeddingLoss, objective_of
from thrifty.objectives.user_loss import UserLoss, explain_parts, loss_of_output
from thrifty.techniques.large_batch.gradient_cache import cached


def assembled(batch: Any) -> dict[str, Tensor]:
    return dict(batch.fields)


def wanted() -> dict[str, Tensor]:
    model = two_towers()
    mean(model(pairs().fields)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_batches", [1, 3, 5])
def test_micro_batches_have_the_gradient_of_the_batch(name: str, micro_batches: int) -> None:
    model, objective = two_towers(), objective_of(LOSSES[name], assembled)
    backward = cached(plain_backward, micro_batches) if micro_batches > 1 else plain_backward
    result = backward(model, objective, pairs())
    assert result.loss.item() == pytest.approx(LOSSES[name](two_towers(), pairs().fields).item(), rel=1e-6)
    for key, gradient in wanted().items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_compare_the_examples_of_all_ranks(name: str) -> None:
    expected = wanted()["first.bias"].tolist()
    for found in on_ranks(2, gradient_on_ranks, name):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_embeddings_without_values_have_losses(name: str) -> None:
    with torch.device("meta"):
        assert LOSSES[name](two_towers(), {"x": torch.empty(6, 4).double(), "y": torch.empty(6, 4).double()}).is_meta


def test_compared_values_are_not_rounded_by_autocast() -> None:
    seen: list[torch.dtype] = []

    def compare(vectors: Tensor) -> Tensor:
        seen.append((vectors[:, 0] @ vectors[:, 1].T).dtype)
        return mean(vectors)

    with torch.autocast("cpu", torch.bfloat16):
        EmbeddingLoss(embeddings, compare)(two_towers().float(), {k: v.float() for k, v in pairs().fields.items()})
    assert seen == [torch.float32]


def test_unequal_weights_need_a_loss_of_each_example() -> None:
    uneven = pairs().weighted(torch.linspace(0.1, 1, len(pairs()), dtype=torch.float64))
    with pytest.raises(RefusedError, match="sampled with weights"):
        plain_backward(two_towers(), objective_of(LOSSES["mean"], assembled), uneven)
    plain_backward(two_towers(), objective_of(LOSSES["each"], assembled), uneven)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (EmbeddingLoss(lambda model, batch: model(batch)[:, 0]), "two vectors"),
        (EmbeddingLoss(lambda model, batch: model(batch).unbind(1)), "returns a tuple"),
        (EmbeddingLoss(lambda model, batch: model(batch).detach()), "embeddings has no gradient"),
        (EmbeddingLoss(embeddings, lambda vectors: each(vectors)[:2]), r"tensor of shape \(2,\)"),
        (EmbeddingLoss(lambda model, batch: model(batch["z"])), "keys x, y"),
    ],
)
def test_wrong_shapes_are_refused_with_the_fix(loss: EmbeddingLoss, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        plain_backward(two_towers(), objective_of(loss, assembled), pairs())
    assert refused.value.fix


def padded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a mean over parts of examples, as language models of transformers with padded texts."""
    parts = torch.arange(len(batch["x"])) + 1
    return (model.first(batch["x"]).square().mean(1) * parts).sum() / parts.sum()  # type: ignore[operator]


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.first(batch["x"]).square().mean()  # type: ignore[operator]


def rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.first(batch["x"]).square().mean(1)  # type: ignore[operator]


@pytest.mark.parametrize(("loss", "differs"), [(mean_of_batch, True), (padded, True), (plain, False), (rows, False)])
def test_means_that_parts_change_are_explained(loss: Any, differs: bool) -> None:
    text = explain_parts(UserLoss(loss, assembled), two_towers(), pairs(8))
    assert ("not the mean of the losses of their halves" in text) == differs == bool(text)


def test_runs_are_loaded_and_resumed_with_the_same_functions(tmp_path: Path) -> None:
    def passed(loss: Any) -> dict[str, Any]:
        return {"model": two_towers, "data": Pairs(), "held_out": Pairs(), "loss": loss, "quiet": True}

    run = thrifty.train(**passed(LOSSES["mean"]), techniques=["gradient_cache", "sgd"], budget="4 steps", batch=8,
                        runs=tmp_path, name="half", observers=[lambda record: record.step < 2])  # fmt: skip
    assert isinstance(run.load_model(), nn.Module)
    with pytest.raises(UsageError, match="source of two_towers:mean has changed"):
        thrifty.resume(tmp_path / "half", **passed(LOSSES["each"]))
    assert thrifty.resume(tmp_path / "half", **passed(LOSSES["mean"])).summary["steps"] == 4


def test_training_in_parts_names_a_loss_of_whole_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def trained(loss: Any, technique: str) -> str:
        thrifty.train(
            two_towers, Pairs(), held_out=Pairs(), loss=loss, techniques=[technique, "sgd"], budget="2 steps",
            batch=8, runs=tmp_path, name=f"{technique}-{loss is mean_of_batch}",
        )  # fmt: skip
        return capsys.readouterr().err

    assert "large_batch.gradient_accumulation: the loss of 8" in trained(mean_of_batch, "gradient_accumulation")
    assert "not the mean" not in trained(LOSSES["mean"], "gradient_cache")
    with pytest.raises(RefusedError, match="gradient_accumulation"):
        trained(LOSSES["mean"], "gradient_accumulation")


def test_the_notice_calls_the_loss_as_a_step_does(tmp_path: Path) -> None:
    techniques = ["gradient_accumulation", "bfloat16_weights", "sgd"]
    run = thrifty.train(lambda: two_towers().float(), Pairs(), held_out=Pairs(), loss=plain, techniques=techniques,
                        budget="2 steps", batch=8, runs=tmp_path, quiet=True)  # fmt: skip
    assert run.summary["steps"] == 2


@pytest.mark.parametrize("is_padded", [True, False])
def test_means_over_tokens_are_named_before_training(is_padded: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model, tokens = GPT2LMHeadModel(GPT2Config(**sizes)).eval(), torch.randint(500, (8, 32))
    labels = tokens.where(torch.arange(32) < torch.randint(4, 32, (8, 1)), -100) if is_padded else tokens
    rows = Batch({"input_ids": tokens, "labels": labels}, torch.full((8,), 1 / 8))
    assert ("not the mean" in explain_parts(UserLoss(loss_of_output, assembled), model, rows)) is is_padded


def drawn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model.first(batch["x"]) + torch.randn(1, dtype=torch.float64)).square().mean()  # type: ignore[operator]


def test_random_losses_are_not_explained() -> None:
    assert not explain_parts(UserLoss(drawn, assembled), two_towers(), pairs(8))
