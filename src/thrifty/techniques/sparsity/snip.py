"""SNIP: prune before training, keeping the weights that the loss feels the most.

Paper     Lee et al. 2019, SNIP: Single-shot Network Pruning based on Connection Sensitivity (arXiv 1810.02340).
Promise   one mask for the whole run, from one step's gradients: the share `density` of all masked weights together
          whose removal would change the loss most, to first order. At low densities it keeps every layer connected
          where random masks and magnitudes do not (thrifty study pruning_digits).
Cost      the first `scoring_steps` steps only look: they make no other update, and are steps of the budget. One number
          more per masked weight if those are above 1; some 20 bytes for each, on every rank, when masks are chosen.
Avoid     without variance-preserving first values, which the method builds on; choose those of the model's preset.
Note      gradients of all these steps are summed before the absolute value is taken. The paper divides by the sum of
          all scores, which changes no mask, and scores biases too; here biases, norms, embeddings and the head stay
          dense. A layer may be left with nothing: the note "empty_weights" counts those. Scoring steps are the first
          of a run, so a fork from a later one is refused; there sparsity.static and sparsity.gradual do.
"""

from torch import Tensor

from thrifty.techniques.sparsity._mask_techniques import SaliencyMaskTechnique


def snip_scores(weight: Tensor, gradient: Tensor) -> Tensor:
    """|gradient · weight|, elementwise: how much the loss changes, to first order, if a weight is multiplied by a
    little less than 1. Weight and gradient of the loss have one shape."""
    return (gradient * weight).abs()


class Snip(SaliencyMaskTechnique):
    def scores(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return snip_scores(weight, gradient)
