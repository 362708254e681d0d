"""`thrifty plan RECIPE`: a plan in words, as JSON and as a recipe that trains."""

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_recipes
import transformers
from click.testing import CliRunner, Result
from command_line import TINY, write_corpus

import thrifty
from thrifty import techniques
from thrifty.cli.explain import command as explain
from thrifty.cli.plan.plan_verb import command
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError
from thrifty.core.plain_values import read_size
from thrifty.core.recipe import Budget
from thrifty.experiments.evidence import Evidence
from thrifty.planning import forecast_ledger, planner, rank_options
from thrifty.recipes.recipe_toml import read_recipe, recipe_to_data
from thrifty.training import run_ledger
from thrifty.training.memory_meter import MemoryMeter
from thrifty.training.process_launch import launch_command
from thrifty.training.rank_setup import mesh_sizes
from thrifty.training.trainer import train


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small recipe as a file, in a folder with its corpus and a cache of its own."""
    folder = tmp_path_factory.mktemp("planned")
    write_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("THRIFTY_CACHE", str(folder / "cache"))
        patched.setattr(MemoryMeter, "process", 0.0)  # that of the tests would hide what is planned
        yield _write_recipe(folder)


def _write_recipe(folder: Path) -> str:
    settings = TINY | {"data.source": "corpus", "budget.steps": 20}
    tables: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, name = path.split(".")
        tables.setdefault(section, {})[name] = value
    lines = ['name = "small"', 'device = "cpu"']
    for section, values in tables.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    lines += ["[techniques.optimizers.adamw]", "[techniques.schedules.linear]"]
    (folder / "small.toml").write_text("\n".join(lines))
    return "small.toml"


@pytest.fixture(scope="module")
def fitting(recipe: str) -> dict[str, Any]:
    """Its plan where memory is plenty, on a machine with somebody's technique installed that cannot be imported."""
    stranger = EntryPoint("optimizers.stranger", "no_such_package:Stranger", "thrifty.techniques")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(techniques, "_installed", lambda: EntryPoints([stranger]))
        return plan(recipe)


@pytest.fixture
def one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way that may be gone is counted, which takes seconds: one axis will do where the ways do not matter."""
    monkeypatch.setattr(planner, "AXES", {"optimizer state": planner.AXES["optimizer state"]})


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words, catch_exceptions=False)


def counting(words: Sequence[str]) -> Sequence[str]:
    """Without running steps, which a plan for a cluster does not do anyway."""
    return words if "--cluster" in words else (*words, "--no-probe")


def plan(*words: str) -> dict[str, Any]:
    result = run(*counting(words), "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words: str) -> ThriftyError:
    with pytest.raises(ThriftyError) as error:
        run(*counting(words))
    assert error.value.fix
    return error.value


def test_a_fitting_recipe_is_kept_with_a_reason_per_technique(fitting: dict[str, Any]) -> None:
    found = fitting
    assert found["changes"] == [] and found["forecast"]["steps"]["value"] == 20
    assert found["forecast"]["dominant"]["memory"][0] in ("activations", "temporary", "optimizer", "parameters")
    reasons = {each["technique"]: each for each in found["techniques"]}
    assert len(reasons) > 70 and all(each["why"] for each in reasons.values())
    assert reasons["optimizers.adamw"]["verdict"] == "kept"
    assert "third-party" in reasons["optimizers.stranger"]["why"]


@pytest.mark.slow
def test_less_memory_adds_techniques_and_plans_are_written(recipe: str, fitting: dict[str, Any]) -> None:
    whole = fitting["forecast"]["counted"]
    out = ("--out", "plan.toml", "--export", "accelerate", "--export", "deepspeed", "--export", "torchtitan")
    found = plan(recipe, "--memory", f"{0.9 * whole:.0f}", "--tokens", "5120", *out)
    assert found["changes"] and found["forecast"]["counted"] < 0.82 * whole
    written = read_recipe(Path("plan.toml"))
    assert written.name == "small-planned" and written.budget.tokens == 5120
    assert found["forecast"]["steps"]["value"] == 20
    added = {each["technique"] for each in found["techniques"] if each["verdict"] == "added"}
    assert added and added <= {technique.name for technique in written.techniques}
    assert Path("plan.toml").read_text().startswith("# change   ")
    assert found["written"] == ["plan.toml", "plan-accelerate.yaml", "plan-deepspeed.json", "plan-torchtitan.toml"]
    assert tomllib.loads(Path("plan-torchtitan.toml").read_text())["training"]["steps"] == 20
    assert "exists already" in refused(recipe, "--out", "plan.toml").what


@pytest.mark.slow
@pytest.mark.usefixtures("one_axis")
def test_probed_plans_print_and_store_earlier_errors(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    small = replace(read_recipe(Path(recipe)), budget=Budget(steps=5))
    run_ledger.record_forecast(recipe_to_data(small), {"memory": 1e8, "step": 0.01})
    summary = train(small, quiet=True)
    (entry,) = forecast_ledger.entries("cpu")
    assert entry.predicted == {"counted": summary["predicted_memory"], "memory": 1e8, "step": 0.01}
    assert entry.measured["memory"] == summary["peak_memory"] and entry.measured["step"] > 0
    result = run(
        recipe,
        "--hours",
        "0.001",
        "--probe-seconds",
        "0.2",
        "--probed-candidates",
        "1",
        "--price-per-hour",
        "2",
        "--out",
        "probed.toml",
    )
    assert result.exit_code == 0, result.output
    assert "over 1 earlier runs" in result.stdout and "cost" in result.stdout
    assert "→  the unchanged recipe" in result.stdout
    written = read_recipe(Path("probed.toml"))
    assert written.budget.seconds == pytest.approx(3.6)
    kept = run_ledger.forecast_file(recipe_to_data(written))
    disturbed = "step times are upper bounds, and the next plan measures them again" in result.stdout
    assert json.loads(kept.read_text()).keys() == ({"memory"} if disturbed else {"memory", "step"})


@pytest.mark.slow
@pytest.mark.usefixtures("one_axis", "recipe")
def test_a_folder_and_a_file_are_enough_to_plan_for() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=600, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained("trained")
    small = [f"{name}={value}" for name, value in TINY.items() if name.startswith(("data.", "evaluation."))]
    found = plan(
        "--model", "trained", "--data", "corpus", "--tokens", "2048", *(w for s in small for w in ("--set", s))
    )
    assert found["recipe"].endswith("-planned") and found["forecast"]["counted"] > 4 * 600 * 32
    reasons = {each["technique"]: each["why"] for each in found["techniques"]}
    assert reasons["adapters.lora"].startswith("changes the result; the plan allows only exact changes")


OWN = """
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize

def build():
    model = assemble(ModelConfig("gpt", 5, 16, 4, 4, 32, 600, 64, tied=True))
    initialize(model, 0)
    return model
"""


@pytest.mark.slow
@pytest.mark.usefixtures("one_axis")
def test_own_models_are_named_by_their_builder(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[object] = []
    monkeypatch.setattr(run_ledger, "record_forecast", lambda *given: expected.append(given))
    Path("own_models.py").write_text(OWN)
    words = (
        recipe,
        "--model",
        "own_models:build",
        "--out",
        "own.toml",
        "--probe-seconds",
        "0.2",
        "--probed-candidates",
        "1",
    )
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "start it with thrifty train --model own_models:build own.toml" in result.stdout
    assert 'build = "own_models:build"' in Path("own.toml").read_text()
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert "not run" not in steps[0]  # its probe built it as well, in a process of its own
    assert expected


@pytest.mark.usefixtures("one_axis")
def test_a_cluster_plan_is_a_recipe_with_an_explainable_mesh(recipe: str) -> None:
    found = plan(recipe, "--cluster", "h100-box", "--ranks", "2", "--allow", "rounding", "--out", "mesh.toml")
    assert found["simulated"] and found["written"] == ["mesh.toml"]
    explained = CliRunner().invoke(explain, ["mesh.toml", "--json"], catch_exceptions=False)
    assert explained.exit_code == 0, explained.output
    told = json.loads(explained.stdout)
    assert told["refused"] == {} and math.prod(told["mesh"].values()) == 2
    assert told["footprint"]["memory"] == found["alternatives"][0]["memory"]
    assert "simulated, not measured" in Path("mesh.toml").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("one_axis")
def test_a_plan_for_local_ranks_runs_their_steps(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_options, "SHARING", 0.01)  # whatever is measured, it is tried
    words = ("--ranks", "2", "--allow", "rounding", "--seconds", "600")
    words += ("--probe-seconds", "0.2", "--probed-candidates", "1")
    found = json.loads(run(recipe, *words, "--json").stdout)
    one, other = found["alternatives"]
    assert sorted([*one["changes"], *other["changes"]]) == ["replicate=2 with parallelism.replicate"]
    assert all(each["forecast"]["step"]["value"] > 0 for each in (one, other)) and not found["misfits"]

    whole = found["alternatives"][one["changes"] != []]["forecast"]["counted"]
    tight = plan(recipe, *words[:6], "--memory", f"{0.8 * whole:.0f}", "--out", "ranks.toml")
    written = read_recipe(Path("ranks.toml"))
    assert tight["ranks"] == written.mesh.least_ranks == 2
    assert mesh_sizes(written, 2)[tight["changes"][-1].partition("=")[0]] == 2


def test_the_process_counts_on_a_processor(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "AXES", {})
    monkeypatch.setattr(MemoryMeter, "process", 300e6)
    error = refused(recipe, "--memory", "200MB")
    assert re.search(r"the smallest needs about 30\d MB", error.what) and "of the process" in error.what
    found = plan(recipe, "--memory", error.fix.split(",")[0].split()[-1])
    assert found["forecast"]["process"] == 300e6 and found["forecast"]["memory"]["value"] < 10e6
    printed = run(recipe, "--no-probe").stdout
    assert re.search(r"memory   30\d MB .*at the peak: 300 MB of the process before the model is built, ", printed)


def test_unusable_ranks_are_refused_with_the_reason(recipe: str) -> None:
    error = refused(recipe, "--ranks", "2", "--allow", "exact")
    assert "--allow exact forbids" in error.what and error.fix == "--allow rounding"
    assert launch_command(2) == "thrifty train --ranks 2" and launch_command(1) == "thrifty train"


@pytest.mark.slow
@pytest.mark.usefixtures("one_axis")
def test_infeasible_budgets_are_refused_with_what_they_require(recipe: str) -> None:
    error = refused(recipe, "--memory", "100kB")
    assert isinstance(error, InfeasibleError) and "the smallest needs about" in error.what and "--memory" in error.fix


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("txt",), "there is no recipe 'txt'", "did you mean 'text'?"),
        (("szie", "--flops", "1e18"), "there is no recipe 'szie'", "did you mean 'size'?"),
        (("text", "--model", "no_such_module:build"), "no_such_module cannot be imported", "correct the name"),
        (("text", "--model", "json:dmps"), "json has no 'dmps'", "dumps"),
        (("text", "--cluster", "h100-box", "--mesh", "tensor=2"), "the recipe has a mesh", "remove the mesh"),
        (
            ("text", "--cluster", "h100-box", "--out", "x.toml", "--export", "script"),
            "--export does not support cluster plans",
            "--out",
        ),
        (
            ("text", "--cluster", "h100-box", "--probed-candidates", "2"),
            "--probed-candidates applies only to this machine",
            "remove",
        ),
        (
            ("text", "--cluster", "h100-box", "--probe-seconds", "3"),
            "--probe-seconds applies only to this machine",
            "remove",
        ),
        (("text", "--cluster", "h100-box", "--no-probe"), "--no-probe applies only to this machine", "remove"),
        (("text", "--cluster", "h100-box", "--disk", "1GB"), "--disk applies only to this machine", "remove --disk"),
        (
            ("text", "--model", "json:dumps", "--out", "x.toml", "--export", "script"),
            "'json:dumps' is your own model",
            "the other exports work",
        ),
        (("text", "--cluster", "nowhere"), "unknown cluster 'nowhere'", ""),
        (("text", "--disk", "much"), "disk 'much' is not a size", "400MB"),
        (("text", "--memory", "much"), "memory 'much' is not a size", "400MB"),
        (("text", "--hours", "0"), "--hours is 0", "positive"),
        (("text", "--tokens", "1", "--flops", "1"), "--tokens and --flops exclude each other", "remove --flops"),
        (("text", "--export", "script"), "--export requires --out", "--out plan.toml"),
        (("text", "--mesh", "tensor=2"), "planning chooses the mesh", "--ranks 2"),
    ],
)
def test_unplannable_recipes_are_refused(words: tuple[str, ...], what: str, fix: str) -> None:
    error = refused(*words)
    assert isinstance(error, UsageError) and what in error.what and fix in error.fix


def test_sizes_are_read_in_powers_of_ten_and_of_two() -> None:
    assert [read_size(text) for text in ("400MB", "1.5 gb", "2GiB", "4e8", "7k")] == [4e8, 1.5e9, 2**31, 4e8, 7e3]


def test_help_of_the_group_names_both_kinds_of_plans() -> None:
    text = run("--help").stdout
    assert "thrifty plan RECIPE" in text and "size" in text and "fit" in text
    assert "--memory" in run("recipe", "--help").stdout
    assert "--memory" in run("text", "--help").stdout


def test_the_longest_isolated_comparison_is_the_best_evidence() -> None:
    def compared(words: str, alone: bool, tokens: int) -> SimpleNamespace:
        return SimpleNamespace(technique="growth.stacking", alone=alone, tokens=tokens, in_words=lambda: words)

    several = [compared("long", True, 300), compared("short", True, 100), compared("with others", False, 900)]
    assert Evidence(comparisons=tuple(several)).best() == "long"


def test_a_plan_for_images_counts_images() -> None:
    said = repr(thrifty.plan(tiny_recipes.digits(budget=Budget(epochs=2)), memory="4GB", probe=False, quiet=True))
    assert "images/s" in said and "tokens/s" not in said and " images\n" in said
    steps = -(-2 * 1300 // 64)
    assert f"for {steps} steps, " in said


def test_plan_prints_its_choice_and_all_on_request(fitting: dict[str, Any], recipe: str) -> None:
    chosen = thrifty.plan(read_recipe(Path(recipe)), probe=False, quiet=True)
    short, whole = str(chosen), str(chosen.everything())
    assert "→  the unchanged recipe" in short and "optimizers.adamw" in short and "optimizers.lion" not in short
    assert "optimizers.lion" in whole and len(short.splitlines()) < 25 < len(whole.splitlines())
    left_out = sum(each["verdict"] == "not taken" for each in fitting["techniques"])
    assert re.search(rf"\d+ more candidates and {left_out - 1} techniques not taken: print\(plan.everything", short)
