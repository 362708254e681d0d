"""Files of earlier versions with old names are resumed, read and shown under today's names.

`written_by_06da109` contains two finished runs of 8 steps, with checkpoints at steps 4 and 8, and a comparison. That
commit trained them from the recipes in their folders, with the variables in `EVERYWHERE`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from thrifty import techniques
from thrifty.core.errors import UsageError
from thrifty.core.old_names import (
    OBJECTIVES,
    RECIPE_KEYS,
    SETTINGS,
    TECHNIQUES,
    rename_comparison,
    rename_recipe,
    rename_tensor,
)
from thrifty.experiments.past_results import past_comparisons
from thrifty.objectives import find_objective
from thrifty.recipes.recipe_toml import read_recipe, read_tables, recipe_from_data
from thrifty.reporting.comparison_page import write_comparison_page
from thrifty.reporting.run_record import read_run

WRITTEN = Path(__file__).parent / "written_by_06da109"
RUNS = ("old-text", "old-image")
EVERYWHERE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Environment variables for kernels with the same bits on every CPU."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    shutil.copy(WRITTEN / "text.txt", tmp_path)
    run = tmp_path / "runs" / name
    shutil.copytree(WRITTEN / name, run)
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    (run / "checkpoints" / "LATEST").write_text("step-00000004")
    (run / "summary.json").unlink()
    command = [sys.executable, "-m", "thrifty", "resume", name, "--quiet"]
    environment = {**os.environ, **EVERYWHERE, "OMP_NUM_THREADS": "1", "THRIFTY_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = "checkpoints/step-00000008/tensors.safetensors"
    now, then = load_file(run / last), load_file(WRITTEN / name / last)
    assert now.keys() == {rename_tensor(each) for each in then}
    for each, value in then.items():
        assert now[rename_tensor(each)].equal(value), each
    assert "optimizers.clip" not in (run / "recipe.toml").read_text()
    assert not [path for path in json.loads((run / "origins.json").read_text()) if "growth.patch_size" in path]


@pytest.mark.parametrize("name", RUNS)
def test_a_report_shows_todays_names(name: str, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / name, tmp_path / name)
    record = read_run(tmp_path / name)
    shown = json.dumps([record.recipe, record.origins, record.explanation, record.events]) + record.recipe_text
    assert not record.damage
    for old, new in TECHNIQUES.items():
        assert f'"{old}"' not in shown and f"[techniques.{old}]" not in shown, (old, new)
    assert recipe_from_data(record.recipe) == read_recipe(tmp_path / name / "recipe.toml")


def test_a_comparison_is_evidence_and_a_page_by_todays_names(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    shutil.copy(WRITTEN / "comparison.json", tmp_path / "old")
    evidence = {(one.technique, one.role) for one in past_comparisons(tmp_path)}
    assert evidence == {
        ("averaging.ema", "added"), ("optimizers.adafactor", "added"),
        ("optimizers.adamw", "removed"), ("gradients.clip", "changed"),
    }  # fmt: skip
    page = write_comparison_page(tmp_path / "old").read_text()
    assert "clipped" in page


def test_every_old_name_leads_to_one_of_today() -> None:
    for old, new in TECHNIQUES.items():
        assert techniques.find(new).name == new
        with pytest.raises(UsageError, match=f"did you mean '{new}'"):
            techniques.find(old)
    for name, keys in SETTINGS.items():
        fields = techniques.find(name).__dataclass_fields__
        assert set(keys.values()) <= set(fields) and not set(keys) & set(fields), name
    for old, new in OBJECTIVES.items():
        find_objective(new)
        with pytest.raises(UsageError, match=f"did you mean '{new}'"):
            find_objective(old)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[techniques.optimizers.clip]\nlargest = 0.5\n", "gradients.clip"),
        ("[techniques.gradients.clip]\nlargest = 0.5\n", "max_norm"),
        ("[techniques.optimizers.muon]\nrest_lr = 0.5\n", "adamw_lr"),
        ("[model]\nfresh = true\n", "reinitialize"),
        ("[checkpoints]\nalso = [2]\n", "extra_steps"),
    ],
)
def test_an_old_name_in_a_recipe_is_refused_with_the_new_one(text: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError, match=f"did you mean '{hint}'"):
        recipe_from_data(read_tables(tmp_path / "mine.toml"))


def test_every_old_name_is_renamed_and_no_current_one() -> None:
    tables: dict = {"objective": {"name": "reconstruct"}, "techniques": {"third": {"party": {"largest": 1}}}}
    for section, keys in RECIPE_KEYS.items():
        tables[section] = dict.fromkeys(keys, 1)
    for name, keys in SETTINGS.items():
        old = next((old for old, new in TECHNIQUES.items() if new == name), name)
        group, last = old.split(".")
        tables["techniques"].setdefault(group, {})[last] = dict.fromkeys(keys, 1)
    renamed = rename_recipe(tables)
    assert rename_recipe(renamed) == renamed
    assert renamed["objective"]["name"] == "masked_reconstruction"
    assert renamed["techniques"]["third"] == {"party": {"largest": 1}}
    for name, keys in SETTINGS.items():
        group, last = name.split(".")
        assert renamed["techniques"][group][last].keys() == set(keys.values()), name
    for section, keys in RECIPE_KEYS.items():
        assert renamed[section].keys() == set(keys.values())


def test_a_removed_setting_with_todays_behaviour_is_dropped() -> None:
    def recipe_with(**settings: object) -> dict:
        return {"techniques": {"sparsity": {"sparse_products": settings}}}

    assert rename_recipe(recipe_with(costs="measured")) == recipe_with()
    assert rename_recipe(recipe_with(costs="measured", tokens=64)) == recipe_with(tokens=64)
    with pytest.raises(UsageError, match="costs"):
        recipe_from_data(rename_recipe(recipe_with(costs="counted")))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("lora", "adapters.lora"), ("zero", "parallelism.shard"), ("fsdp", "parallelism.shard"),
        ("ddp", "parallelism.replicate"), ("amp", "precision.mixed"), ("ema", "averaging.ema"),
        ("2:4", "sparsity.n_of_m"), ("gradient_checkpointing", "memory.recompute"), ("lion", "optimizers.lion"),
    ],
)  # fmt: skip
def test_customary_names_are_accepted_everywhere(word: str, name: str, tmp_path: Path) -> None:
    assert techniques.find(word) is techniques.find(name)
    assert techniques.split_settings(f"{word}:a=1") == (name, "a=1")
    assert techniques.split_settings(word) == (name, "")
    (tmp_path / "mine.toml").write_text(f'[techniques."{word}"]\n')
    assert [each.name for each in recipe_from_data(read_tables(tmp_path / "mine.toml")).techniques] == [name]


@pytest.mark.parametrize(("word", "hint"), [("swa", "averaging.latest"), ("rslora", "rank_stabilized=true")])
def test_similar_but_different_names_are_refused(word: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean .*{hint}"):
        techniques.find(word)


def test_a_comparison_with_earlier_keys_has_the_present_ones() -> None:
    recipe = {"techniques": {}, "data": {"source": "kjv"}}
    earlier = {
        "definition": {"terms": {"seeds": 7}, "arms": {"baseline": recipe, "arm": recipe}},
        "outcome": {"arms": {"arm": {"used": 1.0}}},
        "runs": [{"run": "arm-1-seed-0", "arm": "arm", "seed": 0}],
    }
    present = rename_comparison(earlier)
    assert present["definition"] == {"protocol": {"seeds": 7}, "variants": {"baseline": recipe, "arm": recipe}}
    assert present["outcome"] == {"variants": {"arm": {"used": 1.0}}}, "labels stay"
    assert present["runs"] == [{"run": "arm-1-seed-0", "variant": "arm", "seed": 0}]
    assert rename_comparison(present) == present
