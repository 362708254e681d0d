"""Other trainers read the exports, and the plain script reproduces this package's losses."""

import ast
import inspect
import io
import json
import runpy
import tomllib
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from command_line import write_corpus
from planned_runs import CATALOGUE

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.mesh import Mesh
from thrifty.core.recipe import Budget, DataSettings, ModelSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.interface.plan_exports import export_recipe
from thrifty.planning.exports import accelerate, deepspeed, torchtitan
from thrifty.planning.exports.portable_recipe import PortableRecipe
from thrifty.planning.exports.pytorch_script import script
from thrifty.training.loop import train
from thrifty.training.run_setup import prepare_run

STEPS = 4


def technique(name: str, **settings: Any) -> Technique:
    return CATALOGUE[name](**settings)


UPDATE = (
    technique("optimizers.adamw", lr=3e-3),
    technique("schedules.linear", warmup=2, until=STEPS),
    technique("gradients.clip", max_norm=0.5),
)


def elsewhere(*chosen: Technique, mesh: Mesh | None = None, batch: int = 8) -> PortableRecipe:
    recipe = Recipe(data=DataSettings(length=16, batch=batch), mesh=mesh or Mesh(), techniques=(*UPDATE, *chosen))
    return PortableRecipe.of(recipe, recipe.techniques, STEPS, "cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder / "corpus")
    return folder / "corpus"


def planned(corpus: Path, *chosen: Technique, preset: str = "llama-nano") -> Any:
    """Return the parts of a plan that exports use."""
    sizes = ModelSettings(preset=preset, depth=2, width=32, heads=4, hidden=64)
    data = DataSettings(source=str(corpus), vocabulary=320, length=24, batch=7)
    recipe = Recipe(name="small", device="cpu", model=sizes, data=data, budget=Budget(steps=STEPS))
    steps = SimpleNamespace(value=float(STEPS))
    return SimpleNamespace(recipe=replace(recipe, techniques=(*UPDATE, *chosen)), forecast=SimpleNamespace(steps=steps))


def our_losses(recipe: Recipe) -> list[float]:
    run = prepare_run(recipe, quiet=True).run
    return [record.loss for record in train(run, run.start(), recipe.seed)]


@pytest.mark.parametrize(
    ("preset", "chosen", "tolerance"),
    [
        (
            "llama-nano",
            (technique("large_batch.gradient_accumulation", micro_batches=2), technique("memory.recompute")),
            2e-5,
        ),
        ("gpt-nano", (), 2e-5),
        ("llama-nano", (technique("precision.mixed"),), 5e-3),
    ],
    ids=["accumulated and recomputed", "gpt", "bfloat16"],
)
def test_the_plain_script_reproduces_our_losses(
    tmp_path: Path, corpus: Path, preset: str, chosen: tuple[Technique, ...], tolerance: float
) -> None:
    plan = planned(corpus, *chosen, preset=preset)
    path = export_recipe(plan.recipe, STEPS, "script", tmp_path / "plan-script")
    assert "thrifty" not in path.read_text()
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    losses = [float(line.split()[1]) for line in printed.getvalue().splitlines()]
    expected = our_losses(plan.recipe)
    assert len(losses) == STEPS and losses == pytest.approx(expected, rel=tolerance)
    assert losses[-1] < losses[0] - 0.01  # equal losses must also fall
    assert (tmp_path / "plan-script" / "trained" / "config.json").is_file()


def test_scripts_refuse_techniques_without_an_equivalent(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(RefusedError, match=r"lacks sparsity\.static") as error:
        sparse = planned(corpus, technique("sparsity.static", density=0.5))
        export_recipe(sparse.recipe, STEPS, "script", tmp_path / "plan-script")
    assert error.value.fix == "--without sparsity.static"
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path: Path, corpus: Path) -> None:
    plan = planned(corpus)
    for name in ("script", "deepspeed"):
        export_recipe(plan.recipe, STEPS, name, tmp_path / name)
        with pytest.raises(RefusedError, match="exists already"):
            export_recipe(plan.recipe, STEPS, name, tmp_path / name)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (elsewhere(), {"distributed_type": "NO", "mixed_precision": "no", "num_processes": 1, "use_cpu": True}),
        (
            elsewhere(
                technique("precision.mixed"), technique("compile"), technique("parallelism.shard"), mesh=Mesh(shard=2)
            ),
            {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2},
        ),
        (elsewhere(technique("parallelism.replicate"), mesh=Mesh(replicate=2)), {"distributed_type": "MULTI_CPU"}),
    ],
    ids=["alone", "sharded", "replicated"],
)
def test_accelerate_reads_its_configuration(tmp_path: Path, run: PortableRecipe, expected: dict[str, Any]) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate.configuration(run))
    read = ClusterConfig.from_yaml_file(str(path))  # raises for an unknown key
    result = {name: getattr(getattr(read, name), "value", getattr(read, name)) for name in expected}
    assert result == expected
    assert ("dynamo_backend" in read.dynamo_config) if run.compiled else not read.dynamo_config


def test_deepspeed_batch_and_offload() -> None:
    chosen = (technique("large_batch.gradient_accumulation", micro_batches=2), technique("memory.offload_optimizer"))
    made = deepspeed.configuration(elsewhere(*chosen, technique("parallelism.shard"), mesh=Mesh(shard=2)))
    assert made["train_batch_size"] == 2 * made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"]
    assert made["zero_optimization"]["stage"] == 3 and made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert made["gradient_clipping"] == 0.5 and made["optimizer"]["params"]["lr"] == 3e-3
    assert made["scheduler"]["type"] == "WarmupDecayLR" and made["scheduler"]["params"]["warmup_num_steps"] == 2
    assert json.loads(json.dumps(made)) == made
    lower = elsewhere(technique("parallelism.shard", zero=1), mesh=Mesh(shard=2))
    assert deepspeed.configuration(lower)["zero_optimization"]["stage"] == 1
    assert "fsdp_reshard_after_forward: false" in accelerate.configuration(lower)
    with pytest.raises(RefusedError, match="does not divide into 3 equal parts"):
        deepspeed.configuration(elsewhere(technique("large_batch.gradient_accumulation", micro_batches=3)))


FOR_DEEPSPEED = [
    elsewhere(),
    elsewhere(technique("precision.mixed"), technique("memory.recompute")),
    elsewhere(
        technique("precision.mixed", format="float16"), technique("large_batch.gradient_accumulation", micro_batches=4)
    ),
    elsewhere(technique("parallelism.shard"), technique("memory.offload_optimizer"), mesh=Mesh(shard=2)),
    PortableRecipe.of(
        Recipe(data=DataSettings(length=16, batch=8)),
        (UPDATE[0], technique("schedules.cosine", warmup=2)),
        STEPS,
        "cpu",
    ),
]
SECTIONS = {
    "optimizer": {"type", "params"},
    "scheduler": {"type", "params"},
    "zero_optimization": {"stage", "offload_optimizer"},
    "bf16": {"enabled"},
    "fp16": {"enabled"},
    "activation_checkpointing": {"partition_activations", "contiguous_memory_optimization"},
}
"""Exported sections of DeepSpeed's documented configuration (version 0.19.8)."""
NUMBERS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
}  # fmt: skip
ARGUMENTS = {
    "WarmupDecayLR": {"total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
    "WarmupCosineLR": {
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
    },
}  # fmt: skip
"""Arguments of DeepSpeed's schedulers."""


@pytest.mark.parametrize("run", FOR_DEEPSPEED, ids=["plain", "bfloat16", "float16", "sharded", "cosine"])
def test_deepspeed_keys_are_documented_ones(run: PortableRecipe) -> None:
    made = deepspeed.configuration(run)
    assert made.keys() <= NUMBERS | SECTIONS.keys()
    assert all(made[name].keys() <= keys for name, keys in SECTIONS.items() if name in made)
    assert made["optimizer"]["params"].keys() == {"lr", "betas", "eps", "weight_decay"}
    scheduler = made.get("scheduler", {"type": "WarmupDecayLR", "params": {}})
    assert scheduler["params"].keys() <= ARGUMENTS[scheduler["type"]]
    assert scheduler["params"].get("warmup_type", "linear") == "linear"  # as our schedules


@pytest.mark.parametrize("run", FOR_DEEPSPEED, ids=["plain", "bfloat16", "float16", "sharded", "cosine"])
def test_deepspeed_reads_its_configuration(monkeypatch: pytest.MonkeyPatch, run: PortableRecipe) -> None:
    """DeepSpeed reads the configuration. The test runs only if DeepSpeed is installed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_world_size", lambda *group: run.ranks)
    monkeypatch.setattr(config.dist, "get_rank", lambda *group: 0)
    read = config.DeepSpeedConfig(deepspeed.configuration(run))  # raises for incompatible values
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (run.batch, run.parts)
    assert read.zero_config.stage == (3 if run.ranks > 1 else 0) and read.gradient_clipping == (run.clip or 0)
    if made := deepspeed.configuration(run).get("scheduler"):
        known = pytest.importorskip("deepspeed.runtime.lr_schedules")
        assert made["params"].keys() <= inspect.signature(getattr(known, made["type"]).__init__).parameters.keys()


@pytest.mark.parametrize("export", [accelerate, deepspeed])
def test_unsupported_mesh_axes_are_refused(export: Any) -> None:
    run = elsewhere(technique("parallelism.tensor"), mesh=Mesh(tensor=2))
    with pytest.raises(RefusedError, match="no key for ranks along tensor"):
        export.configuration(run)
    read = tomllib.loads(torchtitan.configuration(run))
    assert read["parallelism"]["tensor_parallel_degree"] == 2


@pytest.mark.parametrize("export", [deepspeed, torchtitan])
def test_other_optimizers_than_adamw_are_refused(export: Any) -> None:
    recipe = Recipe(data=DataSettings(length=16, batch=8), techniques=(technique("optimizers.muon"), *UPDATE[1:]))
    with pytest.raises(RefusedError, match=r"the recipe has optimizers\.muon") as error:
        export.configuration(PortableRecipe.of(recipe, recipe.techniques, STEPS, "cpu"))
    assert error.value.fix.startswith("--without optimizers.muon --with optimizers.adamw; ")


def test_torchtitan_export_is_toml_with_notes() -> None:
    text = torchtitan.configuration(elsewhere(technique("memory.recompute"), technique("attention.tiled")))
    read = tomllib.loads(text)
    assert read["activation_checkpoint"]["mode"] == "full" and read["training"]["steps"] == STEPS
    assert "attention.tiled" in text.splitlines()[0]
    assert torch.tensor(read["lr_scheduler"]["decay_ratio"]) == 0.5


HOSTILE = (
    'a"""\nimport os\nos.system("x")\n"""',
    "a'; import os #",
    "a\\",
    "$(touch x)",
    "`touch x`",
    "a\ndebug: true",
    "a\u2028debug: true",
    "a\x85debug: true",
    "a\rdebug: true",
    "a\x00",
    "-rf",
    "..",
    "a/b",
    "",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_escaped_in_exports(name: str) -> None:
    with pytest.raises(UsageError, match="name is"):
        Recipe(name=name)

    plain, hostile = elsewhere(), replace(elsewhere(), name=name, unsupported=(name,))
    tree = ast.parse(script(hostile, "", f"{name}/train.py"))
    [literal] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAME"
    ]
    assert ast.literal_eval(literal) == name
    literal.value = plain.name  # type: ignore[attr-defined]
    assert ast.dump(tree) == ast.dump(ast.parse(script(plain, "", "plain/train.py")))
    read = yaml.safe_load(accelerate.configuration(hostile))
    assert read == yaml.safe_load(accelerate.configuration(plain))
    table = tomllib.loads(torchtitan.configuration(hostile))
    assert table == tomllib.loads(torchtitan.configuration(plain)) | {"job": {"description": name}}
