"""LARS: SGD with momentum whose rate is scaled, layer by layer, to the size of the weights.

Paper     You, Gitman & Ginsburg 2017, Large Batch Training of Convolutional Networks (arXiv 1708.03888).
Promise   a rate that no layer is too small or too large for, so that linear scaling holds up to larger batches: on
          640 of 1280 digits a step, plain linear scaling reached 20 % and LARS 93 % (one small network).
Avoid     at ordinary batches, and for Transformers (LAMB was made for those). Nado et al. 2021 (arXiv 2102.06356)
          match it at large batches with well-tuned Nesterov momentum.
Note      vectors, biases and positions take the plain rate and no decay. Where a norm is 0 the ratio is 1.
          Equal to LARS of pytorch_optimizer 4.1 where no gradient is 0 all over; there the rate stands outside the
          momentum. The paper has it inside (`rate = "inside"`), which differs only once the rate changes.
"""

from typing import Literal

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.setting_bounds import Probability, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import ScaleByMomentum, ScaleByTrustRatio, scale_by_learning_rate


def lars(
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    coefficient: float = 1e-3,
    nesterov: bool = False,
    rate: Literal["outside", "inside"] = "outside",
    schedule: GradientTransform | None = None,
) -> GradientTransform:
    """v = momentum · v + λ · (g + weight_decay · parameter) with λ = coefficient · ‖parameter‖ / (‖g‖ + weight_decay ·
    ‖parameter‖) for each layer; parameter -= lr · v. With the rate "inside", lr multiplies what is added to v, and so
    does `schedule`."""
    ratio, schedule = ScaleByTrustRatio(coefficient, weight_decay), schedule or GradientTransform()
    name = "step_momentum" if rate == "inside" else "layer_scaled_momentum"
    velocity = ScaleByMomentum(momentum, nesterov, name) if momentum else GradientTransform()
    if rate == "inside":
        return chain(ratio, scale_by_learning_rate(lr), schedule, velocity)
    return chain(ratio, velocity, scale_by_learning_rate(lr), schedule)


class Lars(Technique):
    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1.0
    momentum: Probability = 0.9
    weight_decay: Rate = 1e-4
    trust_coefficient: Rate = 1e-3
    """The paper's η: how far a layer moves at rate 1, as a share of its weights' norm."""
    nesterov: bool = False
    learning_rate_placement: Literal["outside", "inside"] = "outside"
    """Whether the learning rate multiplies the momentum or what is added to it."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        rates = self.lr, self.momentum, self.weight_decay, self.trust_coefficient
        return lars(*rates, self.nesterov, self.learning_rate_placement, transform)
