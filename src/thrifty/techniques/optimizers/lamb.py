"""LAMB: Adam's direction, each layer's update as long as the layer's weights allow.

Paper     You et al. 2020, Large Batch Optimization for Deep Learning (arXiv 1904.00962), algorithm 2.
Promise   training at very large batches where one rate for all layers breaks: BERT at 32k sequences a step.
Cost      AdamW's state, and two norms of each parameter a step.
Avoid     at ordinary batches: in a fixed budget of sequences it fell behind AdamW at 16 and 64 a step and overtook it
          only at 256. Nado et al. 2021 (arXiv 2102.06356) match it with tuned Adam.
Note      decay is inside the update whose length is scaled; vectors, biases and positions are spared both decay and
          ratio. Bias correction is in the paper and not in its authors' TensorFlow code (`correct = false`). The ratio
          is per parameter: queries, keys and values in one matrix count as one layer unless `slices = true`.
          pytorch_optimizer's Lamb is another algorithm: decay outside the ratio, ‖w‖ cut at 10, half a correction.
"""

import math

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.setting_bounds import Betas, Epsilon, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
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
    """u = m / (sqrt(v) + eps) + weight_decay · w with Adam's m and v; w -= lr · φ(‖w‖) / ‖u‖ · u for each layer, φ
    keeping the norm within `norm_bounds`."""
    return chain(
        ScaleByAdam(*betas, eps, correct),
        AddDecayedWeights(weight_decay) if weight_decay else GradientTransform(),
        ScaleByTrustRatio(bounds=norm_bounds, slices=slices),
        scale_by_learning_rate(lr),
    )


class Lamb(Technique):
    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-6
    weight_decay: Rate = 0.01
    bias_correction: bool = True
    """Whether the moments are corrected for having started at zero, as in the paper."""
    norm_bounds: tuple[float, float] = (0.0, math.inf)
    """The paper's φ: between which limits the norm of the weights counts."""
    slices: bool = False
    """Whether layers that share a matrix (queries, keys, values; gate, value) have ratios of their own."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        rates = self.lr, self.betas, self.eps, self.weight_decay
        return chain(lamb(*rates, self.bias_correction, self.norm_bounds, self.slices), transform)
