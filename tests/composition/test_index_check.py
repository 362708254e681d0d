"""Indices out of range (tokens, labels, positions) are refused before a run, without computing the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import thrifty
from thrifty.composition.index_check import IndexWithoutRow
from thrifty.core.errors import UsageError

TOKENS, POSITIONS = 20, 16


class Reader(nn.Module):
    """Token model with learned positions. With `reads_values`, the forward pass depends on tensor values."""

    def __init__(self, reads_values: bool = False):
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, 8), nn.Embedding(POSITIONS, 8)
        self.head, self.reads_values = nn.Linear(8, TOKENS), reads_values

    def forward(self, tokens: Tensor) -> Tensor:
        places = (tokens >= -1).long().cumsum(1) - 1  # from a mask, as in models of transformers
        if self.reads_values and int(tokens.sum()) < 0:
            return self.head(self.token(tokens))
        return self.head(self.token(tokens) + self.position(places))


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)


def label(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"])[:, 0, :5], batch["label"], reduction="none")


def picked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return -model(batch["tokens"])[:, 0, :5].gather(1, batch["label"][:, None])[:, 0]


def rows(change: Callable[[dict[str, Tensor]], None] = lambda row: None, length: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    examples: list[dict[str, Tensor]] = [
        {"tokens": torch.randint(0, TOKENS, (length,), generator=generator), "label": torch.tensor(number % 5)}
        for number in range(32)
    ]
    change(examples[9])
    return examples


def arguments(**changed: Any) -> dict[str, Any]:
    return {"model": Reader, "data": rows(), "held_out": rows(), "loss": next_token, "batch": 4, **changed}


def put(part: str, value: int) -> list[dict[str, Tensor]]:
    return rows(
        lambda row: row.update({part: torch.cat([torch.tensor([value]), row[part].view(-1)[1:]]).view_as(row[part])})
    )


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"data": put("tokens", 77)}, "'token' has 20 rows, and 'tokens' of the examples has the value 77"),
    "held out": ({"held_out": put("tokens", 20)}, "'token' has 20 rows, and 'tokens' of the examples has the value 20"),
    "padding": ({"data": put("tokens", -1)}, "has the value -1"),
    "position": ({"data": rows(length=24)}, "'position' has 16 rows, and the model reads row 22"),
    "label": ({"data": put("label", 5), "loss": label}, "the loss has 5 classes, and 'label' .* has the label 5"),
    "no label": ({"data": put("label", -1), "loss": label}, "the loss has 5 classes, and 'label' .* the label -1"),
    "gathered": ({"data": put("label", 5), "loss": picked}, "torch.gather has 5 rows, and 'label'"),
    "by values": ({"model": lambda: Reader(reads_values=True), "data": put("tokens", 77)}, "'tokens' .* the value 77"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("verb", [thrifty.explain, thrifty.check, thrifty.train])
def test_index_out_of_range_is_refused_before_the_run(name: str, verb: Callable[..., Any], tmp_path: Path) -> None:
    changed, words = CASES[name]
    more = {"runs": tmp_path} if verb is thrifty.train else {}
    with pytest.raises(IndexWithoutRow, match=words) as error:
        verb(**arguments(**changed), budget=2, quiet=True, **more)
    assert error.value.fix
    assert not (tmp_path / "run" / "records.jsonl").exists()


def test_ignored_labels_and_negative_indices_are_allowed() -> None:
    assert thrifty.explain(**arguments(data=put("label", -100), loss=label), budget=2, quiet=True).peak

    def from_the_end(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["tokens"])[torch.arange(len(batch["label"])), -batch["label"] - 1].mean(-1)

    assert thrifty.explain(**arguments(loss=from_the_end), budget=2, quiet=True).peak


def test_estimate_refuses_an_index_out_of_range() -> None:
    with pytest.raises(UsageError, match="'token' has 20 rows"):
        thrifty.estimate(Reader(), {"tokens": torch.full((2, 8), 20)}, loss=next_token)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_predictions_use_fake_tensors_only(device: str) -> None:
    kinds: set[type] = set()

    def watched(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kinds.add(type(batch["tokens"]))
        return next_token(model, batch)

    thrifty.explain(**arguments(loss=watched), budget=2, quiet=True)
    thrifty.estimate(Reader(), {"tokens": torch.zeros(2, 8, dtype=torch.long)}, loss=watched, device=device)
    assert kinds == {FakeTensor}


def test_rare_index_out_of_range_is_named_at_its_step(tmp_path: Path) -> None:
    class Late(torch.utils.data.Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            Late.reads += 1
            return rows()[index] if Late.reads < 200 else {"tokens": torch.full((12,), 20), "label": torch.tensor(0)}

    with pytest.raises(IndexWithoutRow, match="has the value 20"):
        thrifty.train(**arguments(data=Late(), runs=tmp_path), budget=60, quiet=True)
    assert (tmp_path / "run" / "records.jsonl").read_text().count('"loss"') > 3


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint32, torch.bool, torch.int8])
def test_tokens_may_have_any_integer_type(kind: torch.dtype, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return next_token(model, {"tokens": batch["tokens"].long()})

    examples = [{"tokens": row["tokens"].to(kind)} for row in rows()]
    options = {**arguments(data=examples, held_out=examples, loss=loss), "budget": 1, "quiet": True}
    assert thrifty.train(**options, runs=tmp_path).summary["steps"] == 1
    wrong = [{"tokens": torch.full_like(row["tokens"], TOKENS + 5, dtype=kind)} for row in examples]
    if kind is not torch.bool:
        with pytest.raises(IndexWithoutRow, match="'tokens' of the examples has the value 25"):
            thrifty.train(**options | {"data": wrong, "held_out": wrong}, runs=tmp_path / "wrong")
