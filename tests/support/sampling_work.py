"""Work of each rank in tests of sampling by gradient norms, in a module that a new process can import."""

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
    """Scores given beforehand, for the examples in order."""

    def __init__(self, given: Tensor):
        self.given = given

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction()

    def scores(self, prediction: Prediction | None, batch: Batch) -> Tensor:
        return self.given[: len(batch)]

    def losses(self, prediction: Prediction | None, batch: Batch) -> Tensor:
        return torch.ones(len(batch))


Gates = list[tuple[float, float]]
"""tau, and whether examples were drawn, of each step."""


def sampled_runs(strategy: str) -> tuple[Gates, Gates]:
    """A run whose gate starts closed and one whose gate starts open."""
    found = []
    for tau in (0.0, 100.0):
        run = compose(plain_run(), with_optimizer([technique(strategy), technique(NAME)]), 3)
        state = run.start()
        state.techniques[NAME]["tau"].fill_(tau)
        found.append([(record.notes["tau"], record.notes["sampled"]) for record in advance(run, state)])
    return found[0], found[1]


def a_number_is_missing_on_one_rank() -> tuple[float, float]:
    """Return True if examples were sampled, and tau after that."""
    scores = torch.tensor([1.0, float("nan") if dist.get_rank() else 2.0, 1.0, 1.0])
    sampler = GradientNormBackward(
        lambda model, objective, batch: BackwardResult(objective.losses(Prediction(), batch).sum()), 2, 0.5
    )
    sampler.state["tau"].fill_(9.0)
    batch = Batch({"tokens": torch.zeros(4, 3, dtype=torch.int64)}, torch.full((4,), 0.25))
    outcome = sampler(nn.Identity(), ScoredAs(scores), batch)
    return outcome.notes["sampled"], float(sampler.state["tau"])
