"""Lion (Chen et al. 2023): update by the sign of a momentum, with one moment instead of two.

Paper       Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), program 1.
Promise     Half of AdamW's optimizer state, and no second moment to compute.
Use         optimizer = thrifty.optim.Lion(model, lr=1e-4, weight_decay=1.0)
Start with  `lion:lr=1e-4,weight_decay=1.0`. The learning rate is 3 to 10 times below AdamW's, and the weight decay is
            larger by the same factor.
Cost        One moment per parameter, 4 bytes in float32.
Avoid       Small batches, because the sign amplifies noise. BERT and T5 at a fixed budget, because Kaddour et al. 2023
            found no gain.
Does not    Work well at AdamW's learning rate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.setting_bounds import Betas, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import AddDecayedWeights, scale_by_learning_rate


class ScaleByLion(GradientTransform):
    """Sign of an average of momentum and gradient; the momentum is updated afterwards (Chen et al. 2023, program 1)."""

    name = "scale_by_lion"
    reach = TransformScope.ROWS

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99):
        self.beta1, self.beta2 = beta1, beta2

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"momentum": [torch.zeros_like(parameter) for parameter in parameters]}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        momentum = slots["momentum"]
        direction = torch._foreach_lerp(momentum, updates, 1 - self.beta1)
        torch._foreach_sign_(direction)
        torch._foreach_lerp_(momentum, updates, 1 - self.beta2)
        return list(direction)


def lion(lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 1.0) -> GradientTransform:
    """Return Lion as a chain. For momentum m and gradient g, parameter -= lr · (sign(β1 m + (1-β1) g) + weight_decay ·
    parameter)."""
    return chain(ScaleByLion(*betas), AddDecayedWeights(weight_decay), scale_by_learning_rate(lr))


class Lion(Technique):
    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: Rate = 1.0

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(lion(self.lr, self.betas, self.weight_decay), transform)
