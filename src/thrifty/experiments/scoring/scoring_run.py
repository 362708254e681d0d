"""One scoring run. It trains for some steps, then scores every training example. The "forgetting" method scores during
training.
"""

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
"""Number of equally spaced steps at which "forgetting" scores all examples."""
COMPUTE_STAGES = {Stage.PRECISION, Stage.COMPRESS, *HOW}
"""Stages whose techniques are removed for per-example gradients, because torch.func cannot batch most of these
techniques."""

Say = Callable[[str], None]


def trained_and_scored(
    prepared: PreparedRun, by: str, steps: int, seed: int, clusters: int, say: Say
) -> tuple[Tensor, ScoringContext]:
    """Train for `steps` steps. Return the scores of the trained model for n examples, (n,), and the scoring context."""
    run, state = prepared.run, prepared.run.start()
    assert state.model is not None
    context = ScoringContext(state.model, run.eval_objective, _examples(prepared.data), run.device, seed, clusters, say)
    with deterministic_kernels(run.device, prepared.recipe.deterministic):
        if by == "forgetting":
            return _forgetting_scores(run, state, context, steps), context
        _train(run, state, steps, seed)
    assert state.model is not None
    context.model = state.model  # a structural change replaces the model object
    if by == "grand":
        context.model, context.objective = plain_model_and_objective(run, state)
    return METHODS[by].score(context), context


def scored_by(
    model: Path | None, recipe: Recipe, prepared: PreparedRun, by: str, clusters: int
) -> tuple[Tensor, ScoringContext]:
    """Return the scores of n examples, (n,), and the scoring context without training. `model` is the folder of a
    trained model, or None for an untrained model.
    """
    run = prepared.run
    embedder = load_embedding_model(model, recipe, prepared.data).to(run.device) if model else nn.Identity()
    context = ScoringContext(embedder, run.plain.objective, _examples(prepared.data), run.device, recipe.seed, clusters)
    scores = METHODS[by].score(context)
    context.guesses = None  # the model was not trained on these labels
    return scores, context


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


def _forgetting_scores(run: Run, state: TrainState, context: ScoringContext, steps: int) -> Tensor:
    forgetting, everything = ForgettingCounter(context.examples.examples), torch.arange(context.examples.examples)
    moments = {round(steps * (look + 1) / LOOKS) for look in range(LOOKS)}

    def look(step: int) -> None:
        if step in moments:
            assert state.model is not None
            context.model = state.model
            forgetting.update(everything, METHODS["forgetting"].score(context))

    _train(run, state, steps, context.seed, look)
    return forgetting.scores()


def plain_model_and_objective(run: Run, state: TrainState) -> tuple[nn.Module, Objective]:
    """Return the model of a run with its current weights, and its objective. Techniques that only change how results
    are computed are removed.
    """
    functional = [each for each in run.techniques if each.stage not in COMPUTE_STAGES]
    same_function = [
        each for each in functional if each.stage is Stage.ATTENTION and each.numerics is not Numerics.DIFFERENT
    ]
    plain = replace(run, techniques=tuple(each for each in functional if each not in same_function), notes={})
    placed, values = plain.init_state(state.log), state.tensors()
    for name, tensor in placed.tensors().items():
        if name.startswith(("parameters/", "buffers/")) and name in values:
            fill_tensor(tensor, full_value(values[name]))
    assert placed.model is not None
    return placed.model, plain.eval_objective
