"""LAMB (You et al. 2020): scale Adam's update of each layer to the norm of its weights, for large batches.

Paper       You et al. 2020, Large Batch Optimization for Deep Learning (arXiv 1904.00962), algorithm 2.
Promise     Training at batch sizes at which one learning rate for all layers fails. The paper trains BERT at 32k
            sequences per step.
Use         optimizer = thrifty.optim.Lamb(model, lr=1e-3)
Start with  `lamb:lr=1e-3`. `slices=true` computes separate trust ratios for queries, keys and values of a fused matrix.
Cost        AdamW's state, and two norms per parameter and step.
Avoid       Ordinary batch sizes, because tuned Adam matches LAMB (Nado et al. 2021, arXiv 2102.06356).
Does not    Rescale vectors, biases or position embeddings, or apply weight decay to them.
"""

import math

from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.setting_bounds import Betas, Epsilon, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.attention_parts import mark_interleaved
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleByAdam, ScaleByTrustRatio, scale_by_learning_rate


def lamb(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    correct: bool = True,
    norm_bounds: tuple[float, float] = (0.0, math.inf),
    slices: bool = False,
) -> GradientTransform:
    """Return LAMB as a chain of transforms.

    u = m / (sqrt(v) + eps) + weight_decay · w with Adam's m and v; w -= lr · φ(‖w‖) / ‖u‖ · u for each layer. φ clips
    the norm to `norm_bounds`.
    """
    return chain(
        ScaleByAdam(*betas, eps, correct),
        AddDecayedWeights(weight_decay),
        ScaleByTrustRatio(bounds=norm_bounds, slices=slices),
        scale_by_learning_rate(lr),
    )


class Lamb(Technique):
    """Weight decay is added before the update is scaled. Bias correction is in the paper but not in its authors'
    TensorFlow code (`bias_correction = false`). Each parameter has one trust ratio: queries, keys and values in one
    matrix count as one layer unless `slices = true`. pytorch_optimizer's Lamb is a different algorithm: weight decay
    outside the trust ratio, ‖w‖ clipped at 10, and half of the bias correction."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-6
    weight_decay: Rate = 0.01
    bias_correction: bool = True
    """True to correct the moments for their initial value of zero, as in the paper."""
    norm_bounds: tuple[float, float] = (0.0, math.inf)
    """Limits of the weight norm, the paper's φ."""
    slices: bool = False
    """True to compute a separate trust ratio for each slice of a fused matrix (queries, keys, values; gate, value)."""

    def model(self, model: nn.Module) -> nn.Module:
        if self.slices:
            mark_interleaved(model)
        return model

    def update(self, transform: GradientTransform) -> GradientTransform:
        rates = self.lr, self.betas, self.eps, self.weight_decay
        return chain(lamb(*rates, self.bias_correction, self.norm_bounds, self.slices), transform)
