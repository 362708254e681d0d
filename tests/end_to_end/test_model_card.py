"""Model card of an export: metadata of the Hub, recorded facts, code that loads the folder, and nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml
from command_line import CommandLine

from thrifty.core.recipe import DataSettings, ModelSettings, Recipe
from thrifty.interface.model_card import write_model_card


def test_a_card_has_metadata_results_and_code_that_loads(thrifty: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    thrifty.train("run", "--set", "checkpoints.every=2", steps=4)
    thrifty("export", "run", "out", "--checkpoint", "2")
    text = (thrifty.folder / "out" / "README.md").read_text(encoding="utf-8")
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["thrifty"]}
    loss = next(each["loss"] for each in thrifty.records("run", "evaluation") if each["step"] == 2)
    for fact in (
        "| Data | corpus |",
        "| Budget | 4 steps |",
        "step 2 of 4",
        f"| loss | {loss:.3f} |",
        "optimizers.adamw",
    ):
        assert fact in text
    assert "nats per token" in text and str(thrifty.folder) not in text
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[-1]
    monkeypatch.chdir(thrifty.folder)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 (our own card)
    assert {"model", "tokenizer"} <= names.keys()


def test_a_card_never_replaces_a_readme(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    write_model_card(tmp_path, tmp_path, Recipe(), 1, is_adapter=False, is_raw=False)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_card_names_data_and_base_model_of_the_hub(thrifty: CommandLine) -> None:
    thrifty.train("run", steps=2)
    folder = thrifty.folder / "card"
    folder.mkdir()
    base = ModelSettings(folder="hub/models--owner--some--model/snapshots/abc")
    recipe = Recipe("named", model=base, data=DataSettings("hub:owner/name"))
    summary = {**json.loads((thrifty.run("run") / "summary.json").read_text()), "status": "interrupted"}
    (thrifty.run("run") / "summary.json").write_text(json.dumps(summary))
    write_model_card(thrifty.run("run"), folder, recipe, 1, is_adapter=False, is_raw=False)
    text = (folder / "README.md").read_text(encoding="utf-8")
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert (metadata["datasets"], metadata["base_model"]) == (["owner/name"], "owner/some--model")
    assert "step 1 of an unfinished run" in text
    assert "This checkpoint was not evaluated." in text and "load_model(model" in text
