"""One run of a scoring: train for some steps, then look at every training example, or along the way."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from thrifty.composition.compose import Run
from thrifty.core.objective import Objective
from thrifty.core.recipe import Recipe
from thrifty.core.stages import HOW, Stage
from thrifty.core.state import TrainState, fill_tensor, full_value
from thrifty.core.technique import Numerics
from thrifty.data.epoch_sampler import EpochSource
from thrifty.data.run_data import RunData
from thrifty.experiments.scoring.embedding_model import load_embedding_model
from thrifty.experiments.scoring.scoring_methods import METHODS, ScoringContext
from thrifty.kernels.example_scores import ForgettingCounter
from thrifty.training.determinism import deterministic_kernels
from thrifty.training.loop import train
from thrifty.training.run_setup import PreparedRun

LOOKS = 10
"""Moments of a run at which forgetting looks at all examples, equally far apart."""
HOW_COMPUTED = {Stage.PRECISION, Stage.COMPRESS, *HOW}
"""Stages that single gradients go without: what is computed in a way of its own torch.func mostly cannot batch."""

Say = Callable[[str], None]


def trained_and_scored(
    prepared: PreparedRun, by: str, steps: int, seed: int, clusters: int, say: Say
) -> tuple[Tensor, ScoringContext]:
    """The scores (n,) by the model that a run has after so many steps, and what was seen and spent on looking."""
    run, state = prepared.run, prepared.run.start()
    assert state.model is not None
    sight = ScoringContext(state.model, run.eval_objective, _examples(prepared.data), run.device, seed, clusters, say)
    with deterministic_kernels(run.device, prepared.recipe.deterministic):
        if by == "forgetting":
            return _forgotten(run, state, sight, steps), sight
        _train(run, state, steps, seed)
    assert state.model is not None
    sight.model = state.model  # another one after a structural change
    if by == "grand":
        sight.model, sight.objective = computed_plainly(run, state)
    return METHODS[by].score(sight), sight


def scored_by(
    model: Path | None, recipe: Recipe, prepared: PreparedRun, by: str, clusters: int
) -> tuple[Tensor, ScoringContext]:
    """The same without training: by a named model, or by none."""
    run = prepared.run
    seer = load_embedding_model(model, recipe, prepared.data).to(run.device) if model else nn.Identity()
    sight = ScoringContext(seer, run.plain.objective, _examples(prepared.data), run.device, recipe.seed, clusters)
    scores = METHODS[by].score(sight)
    sight.guesses = None  # the model was not trained on these examples' labels
    return scores, sight


def _examples(data: RunData) -> EpochSource:
    assert isinstance(data.train, EpochSource)
    return data.train


def _train(run: Run, state: TrainState, steps: int, seed: int, after: Callable[[int], None] | None = None) -> None:
    if not steps:
        return
    with closing(train(run, state, seed)) as loop:
        for record in loop:
            if after is not None:
                after(record.step)
            if record.step == steps:
                return


def _forgotten(run: Run, state: TrainState, sight: ScoringContext, steps: int) -> Tensor:
    forgetting, everything = ForgettingCounter(sight.examples.examples), torch.arange(sight.examples.examples)
    moments = {round(steps * (look + 1) / LOOKS) for look in range(LOOKS)}

    def look(step: int) -> None:
        if step in moments:
            assert state.model is not None
            sight.model = state.model
            forgetting.update(everything, METHODS["forgetting"].score(sight))

    _train(run, state, steps, sight.seed, look)
    return forgetting.scores()


def computed_plainly(run: Run, state: TrainState) -> tuple[nn.Module, Objective]:
    """A run's model at its present values, and its objective, without what decides only how they are computed."""
    kept = [each for each in run.techniques if each.stage not in HOW_COMPUTED]
    same_function = [each for each in kept if each.stage is Stage.ATTENTION and each.numerics is not Numerics.DIFFERENT]
    plainly = replace(run, techniques=tuple(each for each in kept if each not in same_function), notes={})
    placed, values = plainly.init_state(state.log), state.tensors()
    for name, tensor in placed.tensors().items():
        if name.startswith(("parameters/", "buffers/")) and name in values:
            fill_tensor(tensor, full_value(values[name]))
    assert placed.model is not None
    return placed.model, plainly.eval_objective
