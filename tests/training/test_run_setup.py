"""Setup of a run: data opened once per process, of the kind that objective and source determine."""

import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import sums, write_rows
from opened_data import opened_kinds, prepared_on_a_rank
from rank_processes import on_ranks
from safetensors import safe_open
from tiny_recipes import digits, text

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.recipe import Budget, ModelSettings, ObjectiveSettings, Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.models import export_model, hf_folder, model_shape
from thrifty.techniques.adapters.lora import Lora
from thrifty.techniques.large_batch.batch_ramp import BatchRamp
from thrifty.techniques.memory.recompute import Recompute
from thrifty.techniques.parallelism.replicate import ReplicatedDataParallel
from thrifty.training.run_setup import prepare_run
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))


def recipe_of(kind: str, folder: Path) -> Recipe:
    plain = text(folder)
    small = replace(plain.data, length=48)
    if kind == "images":
        return digits()
    if kind == "chats":
        chats = replace(small, source=str(write_rows(folder / "sums.jsonl", sums(80))), vocabulary=320)
        return replace(plain, data=chats, objective=ObjectiveSettings("chat_answers"))
    if kind == "text_pairs":
        rows = [{"source": f"number {n}", "target": f"{n} is it"} for n in range(80)]
        pairs = replace(small, source=str(write_rows(folder / "pairs.jsonl", rows)))
        model = replace(plain.model, preset="t5-nano")
        return replace(plain, data=pairs, model=model, objective=ObjectiveSettings("sequence_to_sequence"))
    return plain


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["text", "text_pairs", "chats", "images"])
def test_a_run_opens_its_data_once(kind: str, tmp_path: Path) -> None:
    recipe = recipe_of(kind, tmp_path)
    with opened_kinds() as prepared:
        first = prepare_run(recipe, quiet=True)
    with opened_kinds() as trained:
        train(recipe, tmp_path / "runs", quiet=True)
    assert prepared == trained == [kind]
    again = prepare_run(recipe, quiet=True)  # from the data that the first one prepared
    assert again.data.identity == first.data.identity
    batch, same = first.data.train.at(3).fields, again.data.train.at(3).fields
    assert batch.keys() == same.keys() and all(torch.equal(batch[name], same[name]) for name in batch)


def test_each_rank_opens_the_data_once(tmp_path: Path) -> None:
    recipe = text(tmp_path)
    recipe = replace(recipe, techniques=(*recipe.techniques, ReplicatedDataParallel()))
    ranks = on_ranks(2, prepared_on_a_rank, recipe)
    assert [names for names, _ in ranks] == [["text"]] * 2
    assert ranks[0][1] == ranks[1][1]


WRONG = {
    "preset": (ModelSettings(preset="llama-nan"), "did you mean 'llama-nano'"),
    "kind": (ModelSettings(preset="vit-nano"), "cannot learn next_token"),
    "folder": (ModelSettings(folder="/nowhere"), "there is no model folder"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_unsuitable_model_is_refused_before_data_are_read(wrong: str, tmp_path: Path) -> None:
    model, message = WRONG[wrong]
    with opened_kinds() as opened, pytest.raises(UsageError, match=message):
        prepare_run(replace(text(tmp_path), model=model), quiet=True)
    assert opened == [] and not (tmp_path / "cache").exists()


def test_a_folders_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = text(tmp_path, budget=Budget(steps=2))
    run = Path(train(recipe, tmp_path / "runs", quiet=True)["folder"])
    model, _ = load_trained_model(run)
    folder = tmp_path / "model"
    export_model(model, model_shape(recipe.model, 300, 16), folder, run / "tokenizer.json")
    opened: list[Path] = []
    monkeypatch.setattr(hf_folder, "safe_open", lambda path, kind: opened.append(path) or safe_open(path, kind))
    settings = ModelSettings(folder=str(folder))
    tuned = replace(recipe, name="tuned", model=settings, techniques=(*recipe.techniques, Lora(), Recompute()))
    assert train(tuned, tmp_path / "runs", quiet=True)["status"] == "finished"
    assert opened == [folder / "model.safetensors"]


def test_each_file_of_a_transformers_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "opt"
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "word_embed_proj_dim": 16}
    config = transformers.OPTConfig(**sizes, ffn_dim=32, vocab_size=300, max_position_embeddings=64)
    transformers.OPTForCausalLM(config).save_pretrained(folder)
    opened: Counter[str] = Counter()

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(folder)):
            opened[Path(arguments[0]).name] += 1

    def open_counted(path: Path, *rest: Any, **options: Any) -> Any:
        opened[Path(path).name] += 1
        return safe_open(path, *rest, **options)

    sys.addaudithook(count)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", open_counted)
    tuned = replace(text(tmp_path, budget=Budget(steps=2)), model=ModelSettings(folder=str(folder)))
    tuned = replace(tuned, techniques=(*tuned.techniques, Lora(), Recompute()))
    assert train(tuned, tmp_path / "runs", quiet=True)["status"] == "finished"
    assert set(opened.values()) == {1} and opened.keys() >= {"config.json", "model.safetensors"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["text", "text_pairs", "chats", "images"])
def test_a_budget_in_epochs_uses_every_example_as_often(kind: str, tmp_path: Path) -> None:
    recipe = replace(recipe_of(kind, tmp_path), budget=Budget(epochs=1.5))
    prepared = prepare_run(recipe, quiet=True)
    source = prepared.run.source
    assert source.examples is not None
    assert prepared.run.steps == -(-3 * source.examples // (2 * source.batch))
    assert prepared.recipe_in_steps.budget == Budget(steps=prepared.run.steps)
    ramped = replace(recipe, techniques=(*recipe.techniques, BatchRamp(start=0.25, multiple=1)))
    growing = prepare_run(ramped, quiet=True).run
    seen = [growing.source.size(step) for step in range(growing.steps)]
    assert seen[0] < seen[-1] and 1.5 * source.examples <= sum(seen) < 1.5 * source.examples + 2 * source.batch


def test_sources_without_epochs_refuse_a_budget_in_them(tmp_path: Path) -> None:
    recipe = replace(text(tmp_path), budget=Budget(epochs=1))
    sources = {recipe.data.source: 1.0, textwrap.__file__: 2.0}
    with pytest.raises(UsageError, match="several sources in one run") as error:
        prepare_run(replace(recipe, data=replace(recipe.data, sources=sources)), quiet=True)
    assert 'budget="500steps"' in str(error.value)


def test_a_user_loss_on_a_text_file_counts_tokens(tmp_path: Path) -> None:
    recipe = text(tmp_path)
    own = replace(recipe, objects=UserObjects(loss=lambda model, batch: model(batch["tokens"]).mean((1, 2))))
    counted = [prepare_run(each, quiet=True).run for each in (recipe, own)]
    first, second = (run.plain.objective.tokens(run.plain.source.at(0)) for run in counted)
    assert first == second == recipe.data.batch * recipe.data.length


@pytest.mark.parametrize(("source", "unit"), [("digits", "images"), ("text", "tokens")])
def test_a_budget_below_one_step_names_its_unit(source: str, unit: str, tmp_path: Path) -> None:
    recipe = replace(digits() if source == "digits" else text(tmp_path), budget=Budget(tokens=3))
    with pytest.raises(InfeasibleError, match=f"a budget of 3 {unit} is less than one step"):
        prepare_run(recipe, quiet=True)
