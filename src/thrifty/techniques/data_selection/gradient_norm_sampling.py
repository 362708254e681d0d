"""Importance sampling (Katharopoulos and Fleuret 2018): sample examples in proportion to gradient norms.

Paper       Katharopoulos and Fleuret 2018, Not All Samples Are Created Equal (arXiv 1803.00942), algorithm 1. For
            softmax cross-entropy the score is EL2N (Paul et al. 2021), the norm of softmax minus one-hot.
Promise     The expected gradient is unchanged, and its variance falls. While the estimated gain exceeds the cost, n of
            `presample` · n examples are sampled by score and reweighted.
Use         run = thrifty.train(recipe="vit-digits", techniques=["gradient_norm_sampling"], budget="2000 steps")
Start with  `gradient_norm_sampling:presample=3`. With many micro-batches, set `scoring_batch` to the examples of one
            micro-batch.
Cost        While sampling is active, a forward pass scores `presample` times as many examples as are trained. The token
            count of the run includes all loaded examples.
Avoid       Runs that end early, because all examples score alike at the start of training. Losses that compare the
            examples of a batch, or that are no losses of single examples; such losses are refused.
Does not    Keep the expectation of Adam's second moments, because Adam averages squares of the reweighted gradients.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource, OversampledSource
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, class_name
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.setting_bounds import Natural, Positive, Probability
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.embeddings import find_head


def variance_reduction(scores: Tensor) -> Tensor:
    """Return tau, the gain of sampling as a factor of the batch size: sqrt(B · sum g²) for B scores on all ranks.

    g are the scores divided by their sum. tau is 1 for equal scores and NaN if all scores are 0. Each rank must have
    the same number of scores.
    """
    mean, mean_square = mean_over_ranks(torch.stack([scores.mean(), scores.square().mean()]).double().cpu())
    return mean_square.sqrt() / mean


def probabilities(scores: Tensor) -> Tensor:
    """Return probabilities (B,) in proportion to scores (B,); uniform if all scores are 0."""
    total = scores.sum()
    return torch.where(total > 0, scores / total, 1 / len(scores))


def sample(batch: Batch, scores: Tensor, count: int) -> Batch:
    """Sample `count` examples with replacement. Probabilities are proportional to the scores (B,).

    The weights of the sampled examples are set so that the expected weighted sum equals the weighted sum over the
    batch.
    """
    chances = probabilities(scores)
    rows = torch.multinomial(chances, count, replacement=True)
    sampled = batch.take(rows)
    return sampled.weighted(sampled.weight / (count * chances[rows]))


@torch.no_grad()
def weighted_scores(model: nn.Module, objective: Objective, batch: Batch, at_once: int) -> Tensor:
    """Return the score of each example times its weight, (b,). Dropout is off, and `at_once` examples run at a time."""
    was_training = model.training
    model.eval()
    parts = [batch.rows(start, start + at_once) for start in range(0, len(batch), at_once)]
    scores = [part.weight * objective.scores(objective.predict(model, part), part) for part in parts]
    model.train(was_training)
    return torch.cat(scores)


class LossFunctionScores(WrappedObjective):
    """A user's loss function with scores: the norms of its gradient with respect to the output of the model's last
    layer. While gradients are off, only the part after this layer is differentiated."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if (named_head := find_head(model)) is None:
            raise RefusedError(
                f"{class_name(model)} has no output layer, so the scores of its loss are unknown",
                fix="--without data_selection.gradient_norm_sampling",
            )
        self.logits: list[Tensor] = []
        is_training = torch.is_grad_enabled()

        def keep(head: nn.Module, inputs: object, output: Tensor) -> Tensor:
            self.logits.append(output if is_training else output.detach().requires_grad_())
            torch.set_grad_enabled(True)
            return self.logits[-1]

        hook = named_head[1].register_forward_hook(keep)
        try:
            return super().predict(model, batch)
        finally:
            torch.set_grad_enabled(is_training)
            hook.remove()

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses, count = self.losses(prediction, batch), len(batch)
        is_single = losses.shape == (count,) and not getattr(prediction, "is_mean", False)
        if not is_single or getattr(prediction, "part_weights", None) is not None:
            raise RefusedError(
                "the loss is no loss of each example, so an example has no score",
                fix='return one loss per example, such as with reduction="none"',
            )
        if len(self.logits) != 1 or len(self.logits[0]) % count:
            raise RefusedError(
                f"the loss calls the model's output layer {len(self.logits)} times, not once for all examples",
                fix="call the model once in the loss; or --without data_selection.gradient_norm_sampling",
            )
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(losses.sum(), self.logits, retain_graph=True)
        return gradient.reshape(count, -1).float().norm(dim=1)


class GradientNormObjective(WrappedObjective):
    """Wrapper of an objective that also stores the weighted scores of the examples in `recorded`."""

    def __init__(self, inner: Objective):
        super().__init__(inner)
        self.recorded: list[Tensor] = []

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        self.recorded.append(batch.weight * self.scores(prediction, batch))
        return super().losses(prediction, batch)


class GradientNormBackward:
    """A backward pass over sampled examples. Sampling is active if the running average of its gain, `state["tau"]`,
    exceeds `threshold`."""

    def __init__(self, inner: Backward, times: int, momentum: float, at_once: int = 0):
        self.inner, self.times, self.momentum, self.at_once = inner, times, momentum, at_once
        # per example, a training step costs 3 forward passes and scoring costs 1; tau must exceed the cost ratio
        self.threshold = (times + 3) / 3
        self.state = {"tau": torch.zeros(())}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        if len(batch) % self.times:
            raise RefusedError(
                f"'{len(batch)}' examples on this rank are not a multiple of presample = {self.times}",
                fix="--batch N, where N is a multiple of the number of ranks",
            )
        count, sampled = len(batch) // self.times, None
        if float(self.state["tau"]) > self.threshold:
            scores = weighted_scores(model, objective, batch, self.at_once or count)
            tau = variance_reduction(scores)
            if tau.isfinite():  # equal on every rank
                sampled = sample(batch, scores, count)
        if sampled is not None:
            outcome = self.inner(model, objective, sampled)
        else:
            scoring, plain = GradientNormObjective(objective), batch.rows(0, count)
            total_weight, trained_weight = mean_over_ranks(torch.stack([batch.weight.sum(), plain.weight.sum()]))
            outcome = self.inner(model, scoring, plain.weighted(plain.weight * (total_weight / trained_weight)))
            tau = variance_reduction(torch.cat(scoring.recorded))
        if tau.isfinite():  # the loop skips a non-finite step, but tau must stay finite
            self.state["tau"].mul_(self.momentum).add_(tau, alpha=1 - self.momentum)
        notes = {"tau": float(self.state["tau"]), "sampled": float(sampled is not None)}
        return replace(outcome, notes=outcome.notes | notes)


class GradientNormSampling(Technique):
    """The scores of examples are computed without dropout, so that they rank examples and not dropout masks. While
    sampling is inactive, the training pass computes the scores; with chunked logits this costs one more matrix product
    with the output head. Each rank samples from its own examples, so the expected gradient is unchanged. All ranks
    activate sampling together. For sequences the squared scores of the tokens are summed.

    While sampling is inactive, tau is underestimated if each rank has few examples per step. Tau cannot exceed the
    square root of the number of scored examples on all ranks together.
    """

    stage, numerics = Stage.SELECT, Numerics.DIFFERENT
    claims = frozenset({Claim.SELECTED_EXAMPLES})

    presample: Positive = 3
    """Ratio of scored examples to trained examples."""
    momentum: Probability = 0.9
    """Momentum of the running average of tau, the estimated gain."""
    scoring_batch: Natural = 0
    """Number of examples scored at once; 0 means the number of trained examples. With many micro-batches, set the size
    of one micro-batch, because scoring otherwise needs more memory than training.
    """

    def batches(self, source: BatchSource) -> BatchSource:
        return OversampledSource(source, self.presample)

    def objective(self, objective: Objective) -> Objective:
        baseline = objective.baseline
        kind = type(baseline).__name__
        if objective.joint:
            raise RefusedError(
                f"the loss of {kind} compares several examples, so a single example has no score",
                fix=f"--without {self.name}",
            )
        if not objective.learns_from:  # the user's own loss
            return LossFunctionScores(objective)
        if type(baseline).scores is Objective.scores:
            raise RefusedError(f"{kind} does not implement gradient-norm scores", fix=f"--without {self.name}")
        return objective

    def backward(self, backward: Backward) -> Backward:
        return GradientNormBackward(backward, self.presample, self.momentum, self.scoring_batch)

    def footprint(self, footprint: Footprint) -> Footprint:
        # whether sampling is active depends on values; this is the cost of a step with active sampling
        return footprint.scale(flops=1 + self.presample / 3)
