"""AdamW: Adam with weight decay taken out of the gradient.

Paper     Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization (arXiv 1711.05101).
Promise   the standard optimizer of Transformers; equal to torch.optim.AdamW to 1e-7 over 100 steps.
Cost      two moments per parameter (8 bytes each in float32).
Avoid     when optimizer memory is what does not fit.
Note      decay follows torch's convention, lr · weight_decay; the paper multiplies by the schedule alone.
"""

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.setting_bounds import Betas, Epsilon, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleByAdam, scale_by_learning_rate


def adamw(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1
) -> GradientTransform:
    """AdamW as a chain of transforms; decay spares vectors, biases and positions (`modeling/parameter_kinds.py`)."""
    return chain(ScaleByAdam(*betas, eps), AddDecayedWeights(weight_decay), scale_by_learning_rate(lr))


class AdamW(Technique):
    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1e-3
    betas: Betas = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: Rate = 0.1

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(adamw(self.lr, self.betas, self.eps, self.weight_decay), transform)
