"""The trained model of a run folder, as the plain architecture."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.batches import BatchSource
from thrifty.core.errors import UsageError, spelled
from thrifty.core.model_spec import UserModelSpec
from thrifty.core.recipe import Recipe
from thrifty.core.stages import Stage
from thrifty.core.state import adopt_buffers, fill_tensor, read_log
from thrifty.core.user_objects import UserObjects
from thrifty.core.user_sources import is_function_name
from thrifty.data.run_metadata import read_model_spec
from thrifty.data.text.text_data import print_to_stderr
from thrifty.models import build_run_model
from thrifty.objectives import find_objective
from thrifty.objectives.user_loss import UserLoss, loss_of_output
from thrifty.recipes.recipe_toml import read_stored_tables, recipe_from_data
from thrifty.training import checkpoint
from thrifty.training.checkpoint_index import CheckpointChoice

RUNNING = {stage for stage in Stage if Stage.SPLIT <= stage <= Stage.SHARD} | {Stage.REDUCE, Stage.ACCUMULATE}
"""Stages of techniques that change only the computation, not the resulting model."""


Adapters = Literal["merged", "kept", "left out"]


def stored_recipe(folder: Path) -> dict[str, Any]:
    """Return the tables of a run's recipe.toml. If the file is missing, return the recipe in the newest undamaged
    checkpoint."""
    if (file := folder / "recipe.toml").is_file():
        return read_stored_tables(file)
    return checkpoint.find_of_run(folder / "checkpoints").scalars["recipe"]


def load_trained_model(
    folder: Path,
    step: CheckpointChoice = "last",
    trained: bool = False,
    plain: bool = True,
    adapters: Adapters = "merged",
    objects: UserObjects | None = None,
) -> tuple[nn.Module, Recipe]:
    """Return the trained model of a run folder, and the recipe.

    Changes by techniques are removed unless `plain` is False. Raise RefusedError for a model that cannot become its
    plain architecture, such as a model without norms; pass `plain=False` for such a model. `adapters` selects whether
    adapters are merged, kept, or left out (the base model). `objects` contains the user's own model and is required if
    the run trained one.

    `step` chooses the checkpoint: "last" (the newest undamaged one), "best" or a step. If the run evaluated an average
    of its weights, the average is returned, or with `trained` the weights in training. No data are required, because
    the run folder stores the model's input and output sizes.
    """
    trained_as = recipe_from_data(stored_recipe(folder))
    recipe = replace(trained_as, objects=objects or UserObjects())
    _compare_models(folder, trained_as, recipe)
    stored = checkpoint.load(folder / "checkpoints", step)

    def built() -> nn.Module:
        is_own = recipe.objects.model is not None and recipe.objective.name != "masked_reconstruction"
        return build_run_model(recipe, UserModelSpec() if is_own else read_model_spec(folder, recipe))

    chosen = [technique for technique in recipe.techniques if technique.stage not in RUNNING]
    objective = find_objective(recipe.objective.name)
    if trained_as.python.loss or (trained_as.python.data and "labelled_text" not in objective.learns_from):
        objective = UserLoss(loss_of_output, dict)
    run = compose(BaseRun(built, BatchSource(), objective), chosen, stored.scalars["steps"])
    state = run.init_state(read_log(stored.scalars))
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None
    adopt_buffers(model, {name: (value.shape, value.dtype) for name, value in stored.tensors.items()})
    for name, tensor in state.tensors().items():
        value = stored.tensors.get(name)
        if value is not None and value.shape == tensor.shape:
            fill_tensor(tensor, value)
        elif name.startswith("parameters/"):
            raise UsageError(
                f"'{folder}' was trained with another model than in its recipe: {name!r} is not in its checkpoint",
                fix="load the tensors with thrifty.training.checkpoint.load into your own model",
            )
    state.load_scalars(stored.scalars)
    values = None if trained else optimizer.eval_weights()
    for parameter, value in zip(optimizer.parameters, values or [], strict=bool(values)):
        fill_tensor(parameter, value)
    if adapters != "merged":
        run = replace(run, techniques=tuple(t for t in run.techniques if t.stage is not Stage.ADAPTERS), notes={})
    if adapters == "left out":
        model = _with_values(run.build_model(state.log), model)
    if plain:
        for technique in reversed(run.techniques):
            model = technique.finish(model)
    return model.eval(), recipe


def _compare_models(folder: Path, stored: Recipe, recipe: Recipe) -> None:
    """Raise UsageError if the passed model is not the model that the run trained. Print a notice if its source code has
    changed."""
    recipe.refuse_missing_objects("model")
    if recipe.model.build != stored.model.build:
        trained = stored.model.build or stored.model.folder or stored.model.preset
        typed, call = f"--model {trained}", f"model={trained.rpartition(':')[2]}"
        fix = spelled(typed, call) if is_function_name(trained) else "leave out --model"
        raise UsageError(f"'{folder}' trained {trained}, not {recipe.model.build}", fix)
    before = stored.python.sources
    for name, digest in recipe.python.sources.items() if recipe.objects.model is not None else ():
        if before.get(name) != digest:
            print_to_stderr(f"the source of {name} has changed since '{folder}' was trained")


def _with_values(model: nn.Module, other: nn.Module) -> nn.Module:
    """Copy the parameter values of `other`, which has additional modules, into `model`. Names are equal, because
    techniques only add names."""
    values = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        fill_tensor(parameter, values[name].detach())
    return model
