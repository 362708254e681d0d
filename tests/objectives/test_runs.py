"""Whole runs of the objectives on text: by the command line, resumed, on two ranks, with user models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import CommandLine, assert_equal, write_corpus
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.recipe import Budget, DataSettings, EvaluationSettings, ObjectiveSettings, Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.techniques.curriculum.sequence_length import SequenceLengthWarmup
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.data_opening import open_examples
from thrifty.training.trainer import train

LEARNED = {
    "masked_token": {"objective__name": "masked_token", "model__preset": "bert-nano"},
    "sequence_to_sequence": {"objective__name": "sequence_to_sequence", "model__preset": "t5-nano"},
    "mass": {"objective__name": "mass", "model__preset": "marian-nano"},
}
PER_STEP = 8 * 32


@pytest.fixture(scope="session")
def thrifty(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("objectives")
    write_corpus(folder / "corpus")
    return CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LEARNED)
def test_resumed_run_equals_uninterrupted_run(thrifty: CommandLine, name: str) -> None:
    changed = {**LEARNED[name], "checkpoints__every": 3, "evaluation__every": 3}
    summary = thrifty.train(name, steps=6, **changed)
    assert summary["tokens"] == 6 * PER_STEP and summary["held_out_loss"] > 0 < summary["unigram_entropy"]
    expected, evaluated = thrifty.tensors(name), thrifty.records(name, "evaluation")
    shutil.rmtree(thrifty.run(name) / "checkpoints" / "step-00000006")
    thrifty("resume", name)
    assert_equal(thrifty.tensors(name), expected)
    assert thrifty.records(name, "evaluation")[-1] == evaluated[-1]
    refused = thrifty("sample", name, exit_code=2).stderr
    kind = {"mass": "sequence_to_sequence"}.get(name, name)
    assert f"a model trained for {kind} does not predict the next token" in refused


def test_encoder_without_masks_exports_to_transformers(thrifty: CommandLine) -> None:
    changed = {**LEARNED["masked_token"], "objective__rate": 0.5, "model__depth": 4}
    thrifty.train("around", "--with", "data_selection.drop_masked_tokens:blocks=1", steps=2, **changed)
    explained = json.loads((thrifty.run("around") / "explanation.json").read_text())
    (row,) = (row for row in explained["techniques"] if row["name"] == "data_selection.drop_masked_tokens")
    assert row["after"]["flops"] < 0.95 * row["before"]["flops"]
    thrifty("export", "around", "exported")
    model, found = transformers.BertForMaskedLM.from_pretrained(thrifty.folder / "exported", output_loading_info=True)
    assert not any(found.values())
    values = thrifty.tensors("around")
    exported = model.bert.encoder.layer[1].output.dense.weight
    assert torch.equal(exported, values["parameters/blocks.1.mlp.down.weight"])


@pytest.mark.slow
def test_two_ranks_follow_the_single_process(thrifty: CommandLine) -> None:
    thrifty.train("single", steps=6, **LEARNED["masked_token"])
    words = thrifty.recipe("double", "--with", "parallelism.replicate", steps=6, **LEARNED["masked_token"])
    thrifty(*words, ranks=2)
    one, other = ([step["loss"] for step in thrifty.records(run)] for run in ("single", "double"))
    assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_pairs_are_learned(thrifty: CommandLine) -> None:
    lines = [f"{n} and {n % 7}\t{n % 7} and {n}\n" for n in range(400)]
    (thrifty.folder / "pairs.tsv").write_text("".join(lines))
    changed = {"objective__name": "sequence_to_sequence", "model__preset": "marian-nano", "evaluation__examples": 40}
    words = ("--data", str(thrifty.folder / "pairs.tsv"))
    refused = thrifty(*thrifty.recipe("no", *words, objective__rate=0.2, **changed), exit_code=2).stderr
    assert "objective.rate is set, but span corruption is not applied to the pairs" in refused
    stderr = thrifty(*thrifty.recipe("cut", *words, steps=1, data__length=4, **changed)).stderr
    assert stderr.count("of the pairs are longer than data.length = 4 and are cut") == 1
    summary = thrifty.train("pairs", *words, steps=60, data__length=16, data__vocabulary=270, **changed)
    assert summary["held_out_loss"] < 0.9 * summary["unigram_entropy"]


def settings(thrifty: CommandLine, **changed: Any) -> DataSettings:
    corpus = str(thrifty.folder / "corpus")
    return DataSettings(**{"source": corpus, "vocabulary": 320, "length": 32, "batch": 8, **changed})


class OwnEncoder(nn.Module):
    """A user's model in plain torch, from tokens to logits."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(32, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embedding(tokens)))


@pytest.fixture
def own_cache(thrifty: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", thrifty.environment["THRIFTY_CACHE"])


def masked_recipe(thrifty: CommandLine, *others: Any, **changed: Any) -> Recipe:
    return Recipe(
        name="own",
        data=settings(thrifty),
        objective=ObjectiveSettings("masked_token", **changed),
        budget=Budget(steps=30),
        evaluation=EvaluationSettings(every=100, examples=16),
        techniques=(AdamW(lr=1e-2), *others),
    )


@pytest.mark.usefixtures("own_cache")
def test_own_model_is_trained_from_python(thrifty: CommandLine, tmp_path: Path) -> None:
    recipe = masked_recipe(thrifty, rate=0.3)
    summary = train(replace(recipe, objects=UserObjects(model=lambda: OwnEncoder(320))), tmp_path, quiet=True)
    assert summary["held_out_loss"] < 0.95 * 5.77  # the logarithm of 320, where it starts


@pytest.mark.usefixtures("own_cache")
def test_run_cuts_texts_before_masking(thrifty: CommandLine, tmp_path: Path) -> None:
    recipe = masked_recipe(thrifty, SequenceLengthWarmup(start=8, until=2, phases=2))
    own = UserObjects(model=lambda: OwnEncoder(320))
    own = UserObjects(model=lambda: OwnEncoder(320))
    short, full = (
        train(replace(recipe, name=name, techniques=techniques, objects=own), tmp_path, quiet=True)
        for name, techniques in (("short", recipe.techniques), ("full", (AdamW(lr=1e-2),)))
    )
    assert 0 < short["tokens"] < full["tokens"] == full["steps"] * PER_STEP


@pytest.mark.usefixtures("own_cache")
def test_example_lengths_equal_the_recipe(thrifty: CommandLine) -> None:
    for name, wanted in (("next_token", 33), ("masked_token", 32), ("sequence_to_sequence", 32), ("mass", 32)):
        recipe = Recipe(data=settings(thrifty), objective=ObjectiveSettings(name))
        objective, data = open_examples(recipe)
        for batch in (objective.examples(data.train.at(0)), next(data.held_out.batches(8, 8))):
            longest = batch.fields.get("source", batch["tokens"])
            assert longest.shape == (8, wanted)
            assert all(tensor.dtype == torch.int64 for tensor in batch.fields.values())


@pytest.mark.usefixtures("own_cache")
def test_tokenizer_without_required_tokens_is_refused(thrifty: CommandLine, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a")).save(str(tmp_path / "t.json"))
    for name, token in (
        ("masked_token", r"<mask> or \[MASK\]"),
        ("mass", r"<mask> or \[MASK\]"),
        ("sequence_to_sequence", "<extra_id_0>"),
    ):
        data = settings(thrifty, tokenizer=str(tmp_path / "t.json"))
        with pytest.raises(UsageError, match=f"has no token {token}") as caught:
            open_examples(Recipe(data=data, objective=ObjectiveSettings(name)))
        assert "leave data.tokenizer out" in caught.value.fix


@pytest.mark.usefixtures("own_cache")
def test_plain_text_without_labels_is_refused(thrifty: CommandLine) -> None:
    with pytest.raises(InfeasibleError, match="has plain text, but the recipe 'run' trains on texts with labels"):
        open_examples(Recipe(data=settings(thrifty), objective=ObjectiveSettings("classification")))
