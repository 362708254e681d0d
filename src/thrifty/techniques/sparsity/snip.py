"""SNIP (Lee et al. 2019): prune before training, keeping the weights to which the loss is most sensitive.

Paper       Lee et al. 2019, SNIP: Single-shot Network Pruning based on Connection Sensitivity (arXiv 1810.02340).
Promise     One mask for the run. It keeps the fraction `density` of weights with the largest |gradient · weight|.
Use         model, optimizer = thrifty.apply((model, optimizer), "snip", density=0.1)
Start with  `snip:density=0.1,scoring_steps=1`. Use more scoring steps for small batches.
Cost        The first `scoring_steps` steps make no update, and count in the budget. Mask selection takes about 20 bytes
            per masked weight on every rank.
Avoid       Initializations that do not preserve variance, because SNIP assumes a constant variance across layers. Forks
            from a later step are refused.
Does not    Score or prune biases, unlike the paper, or prune norms, embeddings and the head.
"""

from torch import Tensor

from thrifty.techniques.sparsity._mask_techniques import SaliencyMaskTechnique


def snip_scores(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return SNIP's score of each weight, |gradient · weight|, in the weight's shape.

    To first order, the score is the change of the loss per relative change of a weight.
    """
    return (gradient * weight).abs()


class Snip(SaliencyMaskTechnique):
    """Gradients of all scoring steps are summed before the absolute value is taken. With several scoring steps, the sum
    takes one more element per masked weight. Differs from the paper: scores are not divided by the sum of all scores,
    because a common divisor changes no mask. A layer may lose all its weights. The metric "empty_weights" counts such
    layers. For a fork use sparsity.static or sparsity.gradual."""

    def scores(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return snip_scores(weight, gradient)
