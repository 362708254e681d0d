"""Functions that each rank runs in tests of sampling by gradient norms."""

import torch
import torch.distributed as dist
from tiny_runs import advance, plain_run, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.backward import BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction
from thrifty.techniques.data_selection.gradient_norm_sampling import GradientNormBackward

NAME = "data_selection.gradient_norm_sampling"


class ScoredAs(Objective):
    """An objective with fixed scores for the examples in order."""

    def __init__(self, fixed: Tensor):
        self.fixed = fixed

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction()

    def scores(self, prediction: Prediction | None, batch: Batch) -> Tensor:
        return self.fixed[: len(batch)]

    def losses(self, prediction: Prediction | None, batch: Batch) -> Tensor:
        return torch.ones(len(batch))


Gates = list[tuple[float, float]]
"""tau and the note "sampled" of each step."""


def sampled_runs(strategy: str) -> tuple[Gates, Gates]:
    """Return the notes of a run with inactive sampling at the start, and of one with active sampling."""
    notes = []
    for tau in (0.0, 100.0):
        run = compose(plain_run(), with_optimizer([technique(strategy), technique(NAME)]), 3)
        state = run.start()
        state.techniques[NAME]["tau"].fill_(tau)
        notes.append([(record.notes["tau"], record.notes["sampled"]) for record in advance(run, state)])
    return notes[0], notes[1]


def sample_with_nan_on_one_rank() -> tuple[float, float]:
    """Return the note "sampled" and tau of a step whose scores contain NaN on one rank."""
    scores = torch.tensor([1.0, float("nan") if dist.get_rank() else 2.0, 1.0, 1.0])
    sampler = GradientNormBackward(
        lambda model, objective, batch: BackwardResult(objective.losses(Prediction(), batch).sum()), 2, 0.5
    )
    sampler.state["tau"].fill_(9.0)
    batch = Batch({"tokens": torch.zeros(4, 3, dtype=torch.int64)}, torch.full((4,), 0.25))
    outcome = sampler(nn.Identity(), ScoredAs(scores), batch)
    return outcome.notes["sampled"], float(sampler.state["tau"])
