"""Gradient-norm sampling: look at more examples than are trained on, and train on those that would move the model.

Paper     Katharopoulos & Fleuret 2018, Not All Samples Are Created Equal (arXiv 1803.00942), algorithm 1; for softmax
          cross-entropy the score is the norm of softmax minus one-hot, which is EL2N (Paul et al. 2021).
Promise   the same expected gradient with less variance: n of `times` · n examples are drawn in proportion to their
          score and weighted by one over it, only while the estimated gain pays for the extra forward pass.
Cost      a forward pass over `times` as many examples, also counted in tokens and seconds.
Avoid     when the forward pass costs as much as what it saves; near the start, where all examples score alike.
Note      across ranks each draws from its own share, which stays unbiased. For sequences the squared scores of the
          tokens are summed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.backward import Backward, Outcome
from thrifty.core.batches import Batch, BatchSource, Presampled
from thrifty.core.bounds import Positive, Probability
from thrifty.core.errors import Refused
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Around, Objective, Prediction
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


def variance_reduction(scores: Tensor) -> Tensor:
    """tau = sqrt(B · sum g²) for scores (B,) normalised to g: the batch-size factor that sampling by them is worth;
    1 for equal scores."""
    share = scores / scores.sum()
    return (len(share) * share.square().sum()).sqrt()


def draw(batch: Batch, scores: Tensor, count: int) -> Batch:
    """`count` examples drawn with replacement in proportion to their scores (B,), weighted so that the expected
    weighted sum over them is the weighted sum over the whole batch."""
    share = scores / scores.sum()
    rows = torch.multinomial(share, count, replacement=True)
    drawn = batch.take(rows)
    return drawn.weighted(drawn.weight / (count * share[rows]))


class Scoring(Around):
    """Another objective that keeps the scores of what it is asked the losses of."""

    def __init__(self, inner: Objective):
        super().__init__(inner)
        self.seen: list[Tensor] = []

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        self.seen.append(self.scores(prediction, batch))
        return super().losses(prediction, batch)


class Sampler:
    """A backward pass over the drawn examples. `state["tau"]` is the running average that opens the gate."""

    def __init__(self, inner: Backward, times: int, momentum: float):
        self.inner, self.times, self.momentum = inner, times, momentum
        # a plain step costs 3 per example, scoring costs 1: sampling must be worth the ratio
        self.threshold = (times + 3) / 3
        self.state = {"tau": torch.zeros(())}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> Outcome:
        if len(batch) % self.times:
            raise Refused(
                f"{len(batch)} examples on this rank are not {self.times} times a whole number",
                fix="choose data.batch as a multiple of the number of ranks",
            )
        count = len(batch) // self.times
        is_open = float(self.state["tau"]) > self.threshold
        if is_open:
            with torch.no_grad():
                scores = objective.scores(objective.predict(model, batch), batch)
            is_open = bool(scores.isfinite().all()) and float(scores.sum()) > 0
        if is_open:
            outcome = self.inner(model, objective, draw(batch, scores, count))
        else:
            scoring = Scoring(objective)
            plain = batch.rows(0, count)
            outcome = self.inner(model, scoring, plain.weighted(plain.weight * self.times))
            scores = torch.cat(scoring.seen)
        tau = mean_over_ranks(variance_reduction(scores.float()).cpu())
        if tau.isfinite():  # the loop skips such a step; it must not close the gate for ever
            self.state["tau"].mul_(self.momentum).add_(tau, alpha=1 - self.momentum)
        return Outcome(outcome.loss, outcome.notes | {"tau": float(self.state["tau"]), "sampled": float(is_open)})


@dataclass(frozen=True)
class GradientNormSampling(Technique):
    stage, numerics = Stage.SELECT, Numerics.DIFFERENT
    claims = frozenset({"which examples are trained on"})

    times: Positive = 3
    """How many times more examples are looked at than trained on."""
    momentum: Probability = 0.9
    """Of the running average of tau."""

    def batches(self, source: BatchSource) -> BatchSource:
        return Presampled(source, self.times)

    def backward(self, backward: Backward) -> Backward:
        return Sampler(backward, self.times, self.momentum)

    def footprint(self, footprint: Footprint) -> Footprint:
        # which way the gate stands depends on values; this is the step with the gate open
        return footprint.scale(flops=1 + self.times / 3)
