"""Mixtures of several text sources, and separate documents in a row."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import write_corpus
from tiny_runs import tiny_model
from torch.nn import functional as F

import thrifty
from thrifty.core.backward import divided_by_parts, plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Budget, DataSettings, ModelSettings, ObjectiveSettings, Recipe
from thrifty.data.text.text_mixture import PERIOD, MixedExamples, MixedSource, example_counts
from thrifty.data.text.token_windows import PackedTokens, TokenWindows
from thrifty.objectives.next_token import NextToken, document_numbers
from thrifty.techniques.large_batch.gradient_accumulation import accumulated
from thrifty.training import checkpoint

LENGTH, END = 4, 255


def text(first: int, windows: int) -> np.ndarray:
    """Return tokens whose first token of each window is unique."""
    return np.arange(first * LENGTH, (first + windows) * LENGTH + 1).astype(np.uint32)


def mixed(batch: int = 10) -> MixedSource:
    sources = [PackedTokens(text(first, 40), LENGTH, batch, first) for first in (0, 1000)]
    return MixedSource(sources, example_counts({"a": 3.0, "b": 1.0}), batch, 0)


def test_each_source_has_its_fraction_and_its_own_epochs() -> None:
    source = mixed()
    firsts = torch.cat([source.at(step)["tokens"][:, 0] for step in range(PERIOD // 10)]) // LENGTH
    of_a = firsts[firsts < 1000]
    assert len(of_a) == 750
    assert sorted(torch.bincount(of_a, minlength=40).tolist()) == [18] * 10 + [19] * 30
    early = firsts[:200]
    assert 130 < int((early < 1000).sum()) < 170  # mixed at all times
    assert firsts[:40].tolist() != mixed(5).at(0)["tokens"][:, 0].tolist()


def test_example_depends_only_on_seed_and_step() -> None:
    source, other = mixed(), mixed()
    whole = source.at(7)
    parts = [other.rows(7, start, start + 5) for start in (0, 5)]
    for name in whole.fields:
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))
    assert whole["key"].unique().numel() == 10


def test_held_out_examples_have_the_same_fractions() -> None:
    parts = [TokenWindows(text(0, 30), LENGTH), TokenWindows(text(1000, 100), LENGTH)]
    examples = MixedExamples(parts, [750, 250])
    firsts = examples.fields(np.arange(len(examples)))["tokens"][:, 0] // LENGTH
    assert len(examples) == 40 and int((firsts < 1000).sum()) == 30 and firsts.unique().numel() == 40


@pytest.mark.parametrize(
    ("weights", "words"), [({"a": 0.0}, "is 0.0"), ({"a": 1.0, "b": 1e-6}, "less than one example")]
)
def test_invalid_weights_are_refused(weights: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        example_counts(weights)


DOCUMENTS = [[5, 6, 7, 8, END], [9, 3, END], [4, 4, 2, 1, 7, END, 12]]


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_separate_documents_equal_single_documents(style: str, micro_batches: int) -> None:
    rows = torch.tensor([[*chain(*DOCUMENTS)], [*chain(*reversed(DOCUMENTS))]])
    documents = [*DOCUMENTS[:2], DOCUMENTS[2][:6], [12], [4, 4, 2, 1, 7, END], [12, 9, 3, END], [5, 6, 7, 8, END]]
    assert sum(map(len, documents)) == rows.numel()
    packed, alone = tiny_model(style=style), tiny_model(style=style)
    objective = NextToken().kept_apart(END)
    backward = divided_by_parts(accumulated(plain_backward, micro_batches))
    outcome = backward(packed, objective, Batch({"tokens": rows}, torch.full((2,), 0.5)))
    losses = []
    for document in documents:
        tokens = torch.tensor([document])
        if len(document) > 1:
            logits = alone.logits(tokens[:, :-1])
            losses.append(F.cross_entropy(logits[0], tokens[0, 1:], reduction="none"))
    expected = torch.cat(losses).mean()
    expected.backward()
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_document_ends_with_its_boundary() -> None:
    assert document_numbers(torch.tensor([[1, END, 2, END, END, 3]]), END).tolist() == [[1, 1, 2, 2, 3, 4]]


def recipe(folder: Path, **more: Any) -> Recipe:
    write_corpus(folder / "corpus")
    write_corpus(folder / "other")
    sources = {str(folder / "corpus"): 3.0, str(folder / "other"): 1.0}
    settings = DataSettings(sources=sources, separate=True, vocabulary=320, length=16, batch=4)
    return Recipe("mixed", data=settings, budget=Budget(steps=6), techniques=(thrifty.AdamW(),), **more)


def test_mixture_run_resumes_bit_identically(tmp_path: Path) -> None:
    chosen = recipe(tmp_path)
    options = {"recipe": chosen, "runs": tmp_path, "quiet": True}
    whole = thrifty.train(**options, name="whole")
    assert f"{tmp_path / 'corpus'} 75.0%" in (whole.folder / "records.jsonl").read_text()
    part = thrifty.train(**options, name="part", observers=[lambda record: record.step != 3])
    again = thrifty.resume(part)
    one, other = (checkpoint.load(run.folder / "checkpoints").tensors for run in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one) and again.loss == whole.loss
    same = thrifty.train(**{**options, "data": dict(chosen.data.sources)}, name="same")
    assert same.loss == whole.loss


def test_separate_documents_require_next_token_prediction(tmp_path: Path) -> None:
    masked = recipe(tmp_path, objective=ObjectiveSettings("masked_token"), model=ModelSettings("bert-nano"))
    with pytest.raises(UsageError, match=r"data\.separate is set, but MaskedToken"):
        thrifty.train(recipe=masked, runs=tmp_path, quiet=True)
