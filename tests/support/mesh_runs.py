"""Runs over a mesh that real ranks start, to be held against what `explain` says without any."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fast_techniques import FAST

from thrifty.cli.recipe_options import build_recipe
from thrifty.core import mesh
from thrifty.core.mesh import AXES, axis
from thrifty.core.shard_layout import local_tensors
from thrifty.core.tensor_tracing import tensor_bytes
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.training.run_setup import prepare_run
from thrifty.training.trainer import train

TINY = (
    "model.width=32",
    "model.depth=3",
    "data.vocabulary=300",
    "data.length=16",
    "data.batch=4",
    "evaluation.examples=4",
)


def recipe(text: Path, name: str, axes: str) -> RecipeLayers:
    """A run of one step with three blocks, two of which are on the same stage where there are two."""
    layers = build_recipe(
        "text", data=str(text), model="llama-nano", budget="1steps", name=name, removals=FAST, mesh=axes
    )
    layers.apply_changes((), (), (*TINY, *["techniques.parallelism.shard.zero=1"] * ("shard" in axes)))
    return layers


def stated_and_held(text: Path, runs: Path, meshes: Sequence[str]) -> list[tuple[Any, dict[str, int], dict[str, int]]]:
    """For each mesh what the run's explanation.json states, where this rank is, and the bytes that it keeps."""
    found = []
    for number, axes in enumerate(meshes):
        chosen = recipe(text, f"run-{number}", axes).recipe()
        train(chosen, runs, quiet=True)
        state = prepare_run(chosen, quiet=True).run.start()
        assert state.model is not None and state.optimizer is not None
        slots = [tensor for tensors in state.optimizer.slots.values() for tensor in tensors]
        kept = {"parameters": [*state.model.parameters()], "gradients": state.optimizer.parameters, "optimizer": slots}
        held = {name: sum(map(tensor_bytes, local_tensors(tensors))) for name, tensors in kept.items()}
        explanation = json.loads((runs / chosen.name / "explanation.json").read_text())
        found.append((explanation, {name: axis(name).place for name in AXES}, held))
        mesh.clear_mesh()
    return found
