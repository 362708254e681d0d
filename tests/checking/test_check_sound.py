"""Correct recipes pass the check: combinations of techniques on tiny runs, and small catalogue recipes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chat_runs import sums, write_rows
from command_line import write_corpus
from small_recipes import tiny_digits
from technique_runs import plain_for
from tiny_runs import plain_run, technique, with_optimizer

from thrifty.checking.promise_check import check, check_run
from thrifty.core.recipe import Recipe
from thrifty.recipes import RECIPES
from thrifty.recipes.autoencoder_recipes import mae_digits
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data

SOUND = [
    "gradients.clip schedules.cosine",
    "adapters.lora memory.recompute large_batch.gradient_accumulation",
    "adapters.intrinsic_dimension schedules.linear",
    "adapters.prefix_tuning gradients.clip",
    "attention.window memory.recompute",
    "data_selection.drop_masked_tokens large_batch.gradient_accumulation",
    "data_selection.gradient_norm_sampling schedules.linear",
    "growth.stacking gradients.clip",
    "curriculum.sequence_length averaging.ema",
    "initializations.rezero optimizers.lion",
    "large_batch.gradient_cache optimizers.lamb",
    "memory.compress_activations gradients.clip",
    "memory.offload_activations memory.offload_optimizer large_batch.gradient_accumulation",
    "precision.mixed memory.recompute measure.noise_scale",
    "precision.bfloat16_weights gradients.clip",
    "sparsity.grasp large_batch.gradient_accumulation",
    "sparsity.rigl memory.recompute optimizers.muon",
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("names", SOUND)
def test_sound_combination_passes(names: str) -> None:
    chosen = names.split()
    verdicts = check_run(lambda: plain_for(*chosen), with_optimizer([technique(name) for name in chosen]))
    assert [verdict for verdict in verdicts if verdict.outcome == "broken"] == []
    assert {"resume", "gradients arrive", "one big batch"} <= {verdict.promise for verdict in verdicts}


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_optimizer_that_amplifies_rounding_breaks_no_promise(style: str) -> None:
    chosen = [technique("large_batch.gradient_accumulation"), technique("optimizers.soap", lr=0.05)]
    verdicts = check_run(lambda: plain_run(style=style), chosen, steps=8)
    assert [verdict for verdict in verdicts if verdict.outcome == "broken"] == []
    assert any("where the last bits of gradients change" in verdict.measured for verdict in verdicts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["adapters.lora", "large_batch.gradient_accumulation", "memory.activation_budget"])
def test_sound_technique_passes_with_dropout(name: str) -> None:
    verdicts = check_run(lambda: plain_for(name, style="gpt", dropout=0.3), with_optimizer([technique(name)]))
    assert [verdict for verdict in verdicts if verdict.outcome == "broken"] == []


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder / "corpus")
    write_rows(folder / "sums.jsonl", sums(200))
    return folder


def on_text(name: str, preset: str) -> Callable[[Path], Recipe]:
    def small_recipe(texts: Path) -> Recipe:
        tables = recipe_to_data(RECIPES[name]())
        for part in ("attention", "compile"):  # slow to start; tested separately
            tables["techniques"].pop(part, None)
        tables["model"] = {"preset": preset, "width": 32, "depth": 2, "heads": 2}
        tables["data"] |= {"source": str(texts / "corpus"), "vocabulary": 320, "length": 32, "batch": 8}
        return recipe_from_data(tables)

    return small_recipe


def chat_recipe(texts: Path) -> Recipe:
    recipe = on_text("text", "llama-nano")(texts)
    return replace(
        recipe,
        data=replace(recipe.data, source=str(texts / "sums.jsonl"), length=48, held_out=0.2),
        objective=replace(recipe.objective, name="chat_answers"),
    )


def small_autoencoder(texts: Path) -> Recipe:
    recipe = mae_digits()
    sizes = {"patch": 4, "width": 32, "depth": 2, "heads": 2, "decoder_width": 32, "decoder_depth": 1}
    return replace(recipe, model=replace(recipe.model, **sizes))


SMALL_RECIPES: dict[str, Callable[[Path], Recipe]] = {
    "text": on_text("text", "llama-nano"),
    "masked": on_text("masked", "bert-nano"),
    "spans": on_text("spans", "t5-nano"),
    "answers": chat_recipe,
    "vit-digits": lambda texts: tiny_digits(),
    "mae-digits": small_autoencoder,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL_RECIPES)
def test_catalogue_recipe_passes(name: str, texts: Path) -> None:
    checked = check(SMALL_RECIPES[name](texts))
    assert checked.broken == () and checked.exit_code == 0
    outcomes = {verdict.promise: verdict.outcome for verdict in checked.verdicts}
    assert outcomes["export"] == "holds"
    assert outcomes["something is learned"] == ("not applicable" if "digits" in name else "holds")
    assert bool(checked.preview) == ("digits" not in name)
