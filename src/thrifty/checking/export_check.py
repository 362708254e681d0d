"""Check that a trained model computes the same logits after export and loading."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import CheckSubject, one_line_error
from thrifty.composition.compose import Run
from thrifty.core.errors import RefusedError
from thrifty.core.eval_mode import eval_mode
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, PairModelSpec
from thrifty.core.plain_values import to_data
from thrifty.core.randomness import start_draws
from thrifty.core.recipe import ModelSettings, Recipe
from thrifty.core.state import TrainState
from thrifty.modeling.module_surgery import find_blocks
from thrifty.models import build_model_for, build_run_model, export_model, export_own_model, shape_for
from thrifty.models.wrapped_autoencoder import WrappedAutoencoder

NEAR = 1e-4
"""Allowed difference of logits, relative to the largest logit."""
NEAR_IN_16_BITS = 2e-2


def export_round_trip(
    subject: CheckSubject, recipe: Recipe, ends: ModelSpec, run: Run, state: TrainState, folder: Path
) -> PromiseVerdict:
    """Remove the techniques from the model of a state, export the model into a folder, load it, and compare logits. The
    model of the state cannot be used afterwards.
    """
    promise, about = "export", "model"
    assert state.model is not None
    model = state.model
    low = any(one.is_low_precision for one in run.techniques)
    before = _logits(model, run, subject)
    try:
        for technique in reversed(run.techniques):
            model = technique.finish(model)
        if recipe.model.build:
            export_own_model(model, to_data(recipe.model), folder)
        else:
            _write(model, recipe, ends, folder)
    except RefusedError as refused:
        return not_applicable(promise, about, refused.what)
    try:
        again = _loaded(recipe, ends, folder, model).to(subject.device)
    except Exception as error:  # any reader of the folder may raise anything
        text = f"the export cannot be loaded: {one_line_error(error)}"
        return broken(promise, about, text, "export the plain architecture: leave out techniques that change it")
    after = _logits(again, run, subject)
    distance, allowed = _distance(after, before), NEAR_IN_16_BITS if low else NEAR
    text = f"after export and loading, logits differ by {distance:.1e} of the largest ({allowed:g} allowed)"
    if distance <= allowed:
        return holds(promise, about, text)
    names = [f"--without {one.name}" for one in run.techniques if one.overrides("finish")]
    return broken(promise, about, text, "; or ".join(names) or "compare thrifty sample of the run and of the export")


def _loaded(recipe: Recipe, ends: ModelSpec, folder: Path, trained: nn.Module) -> nn.Module:
    if not recipe.model.build:
        return build_model_for(ends, ModelSettings(folder=str(folder)), recipe.seed, task=recipe.objective.name)
    model = build_run_model(recipe, ends)
    if not isinstance(model, WrappedAutoencoder):
        return _of_folder(model, folder)
    encoder = _of_folder(model.encoder, folder)  # the export of an autoencoder is its encoder
    model.encoder.load_state_dict(encoder.state_dict())
    model.decoder, model.head = trained.decoder, trained.head  # type: ignore[assignment]
    return model


def _of_folder(model: nn.Module, folder: Path) -> nn.Module:
    if hasattr(model, "from_pretrained"):
        return type(model).from_pretrained(folder)  # type: ignore[attr-defined]
    load_model(model, str(folder / "model.safetensors"))
    return model


@torch.no_grad()
def _logits(model: nn.Module, run: Run, subject: CheckSubject) -> Tensor:
    batch = run.source.at(0).to(subject.device)
    start_draws(subject.seed, subject.device)  # a model may draw random values in evaluation too
    with eval_mode(model):
        return run.plain.objective.predict(model, batch).logits.float().cpu()


def _distance(actual: Tensor, wanted: Tensor) -> float:
    if actual.shape != wanted.shape:
        return float("inf")
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())  # such as the -inf of masked logits
    difference = (actual - wanted).masked_fill(same, 0.0).abs().max()
    return float(difference) / max(float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()), 1e-30)


def _write(model: nn.Module, recipe: Recipe, ends: ModelSpec, folder: Path) -> None:
    shape = shape_for(ends, recipe.model)
    if shape is not None:
        shape = replace(shape, depth=len(find_blocks(model)[1]))
    images = ends if isinstance(ends, ImageModelSpec) else ends.images if isinstance(ends, PairModelSpec) else None
    export_model(model, shape, folder, images=images)
