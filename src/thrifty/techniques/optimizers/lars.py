"""LARS (You et al. 2017): scale SGD's learning rate in each layer to its weight norm, for large batches.

Paper       You, Gitman and Ginsburg 2017, Large Batch Training of Convolutional Networks (arXiv 1708.03888).
Promise     Each layer's learning rate depends on the norms of its weights and gradient, so linear learning-rate scaling
            holds up to larger batches.
Use         optimizer = thrifty.optim.Lars(model, lr=1.0)
Start with  `lars:lr=1.0,trust_coefficient=1e-3`.
Cost        SGD's state, and two norms per parameter and step.
Avoid       Ordinary batch sizes, because tuned Nesterov momentum matches LARS (Nado et al. 2021, arXiv 2102.06356).
            Transformers: use LAMB.
Does not    Rescale vectors, biases or position embeddings, or apply weight decay to them.
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
    """Return LARS as a chain of transforms.

    v = momentum · v + λ · (g + weight_decay · w) with λ = coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖) for each
    layer; w -= lr · v. If `rate` is "inside", lr and `schedule` multiply the term that is added to v, not v itself.
    """
    ratio, schedule = ScaleByTrustRatio(coefficient, weight_decay), schedule or GradientTransform()
    name = "step_momentum" if rate == "inside" else "layer_scaled_momentum"
    velocity = ScaleByMomentum(momentum, nesterov, name) if momentum else GradientTransform()
    if rate == "inside":
        return chain(ratio, scale_by_learning_rate(lr), schedule, velocity)
    return chain(ratio, velocity, scale_by_learning_rate(lr), schedule)


class Lars(Technique):
    """A layer whose weight norm or gradient norm is 0 has the trust ratio 1. Equal to LARS of pytorch_optimizer 4.1 if
    no gradient is 0 everywhere. Differs from the paper by default: the learning rate multiplies the momentum. In the
    paper it multiplies the term added to the momentum (`learning_rate_placement = "inside"`). The two forms differ only
    if the learning rate changes."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1.0
    momentum: Probability = 0.9
    weight_decay: Rate = 1e-4
    trust_coefficient: Rate = 1e-3
    """The paper's η: norm of a layer's update at learning rate 1, relative to the norm of the layer's weights."""
    nesterov: bool = False
    learning_rate_placement: Literal["outside", "inside"] = "outside"
    """Position of the learning rate: it multiplies the momentum ("outside"), or the term added to the momentum
    ("inside")."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        rates = self.lr, self.momentum, self.weight_decay, self.trust_coefficient
        return lars(*rates, self.nesterov, self.learning_rate_placement, transform)
