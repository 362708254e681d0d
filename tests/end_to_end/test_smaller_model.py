"""A run with an early-bird ticket, from its recipe to a folder that `transformers` loads in smaller shapes."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from thrifty.cli.main import thrifty
from thrifty.core.recipe import Budget, CheckpointSettings, DataSettings, EvaluationSettings, ModelSettings, Recipe
from thrifty.modeling.structured_pruning import find_units
from thrifty.models.text_generation import generate
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.sparsity.early_bird import EarlyBird
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(common_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(
        name="smaller",
        model=ModelSettings(preset="llama-nano", width=48, depth=2, heads=4, kv_heads=4, hidden=40),
        data=DataSettings(source=str(common_folder / "corpus"), vocabulary=300, length=16, batch=4),
        budget=Budget(steps=8),
        evaluation=EvaluationSettings(every=100, examples=4),
        checkpoints=CheckpointSettings(every=100),
        device="cpu",
        techniques=(AdamW(lr=1e-2), EarlyBird(every=1, queue=2, distance=0.0, latest=5)),
    )
    runs = tmp_path_factory.mktemp("smaller") / "runs"
    train(recipe, runs, quiet=True)
    return runs / "smaller"


def test_records_describe_search_and_ticket(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    changes = [line for line in lines if line["kind"] == "change"]
    assert [(change["step"], change["decision"]["phase"]) for change in changes] == [(5, "train")]
    curve = {line["step"]: line["notes"] for line in lines if line["kind"] == "step" and line["notes"]}
    assert list(curve) == [3, 4, 5]
    assert all(notes.keys() == {"mask_distance_of_heads", "mask_distance_of_neurons"} for notes in curve.values())


@torch.no_grad()
def test_the_smaller_model_samples_and_loads_in_transformers(run: Path, tmp_path: Path) -> None:
    model, _ = load_trained_model(run)
    units = find_units(model)
    assert {pieces.count for pieces in units.values() if pieces.kind == "heads"} == {3}
    assert sum(pieces.count for pieces in units.values() if pieces.kind == "neurons") == 48
    done = CliRunner().invoke(thrifty, ["export", str(run), str(tmp_path / "out"), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    widest = max(pieces.count for pieces in units.values() if pieces.kind == "neurons")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (loaded.config.num_attention_heads, loaded.config.intermediate_size) == (3, widest)
    assert bool(report["notes"]) == (widest != 24) and all("filled up with zeros" in text for text in report["notes"])
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(loaded(tokens).logits, model.logits(tokens), rtol=1e-5, atol=1e-5)
    expected = loaded.generate(
        tokens[:1, :4], attention_mask=torch.ones(1, 4), do_sample=False, max_new_tokens=8, eos_token_id=None
    )
    assert torch.equal(generate(model, tokens[:1, :4], 8, greedy=True), expected)
