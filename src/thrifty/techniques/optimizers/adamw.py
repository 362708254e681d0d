"""AdamW (Loshchilov and Hutter 2019): decouple weight decay from Adam's gradient moments.

Paper       Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization (arXiv 1711.05101).
Promise     The standard optimizer of Transformers. Equal to torch.optim.AdamW within rounding.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `adamw:lr=1e-3`. Use smaller learning rates for larger models.
Cost        Two moments per parameter, 4 bytes each in float32.
Avoid       Models whose AdamW state does not fit in memory: use lion, adafactor or precision.optimizer_state.
Does not    Apply weight decay to vectors, biases or position embeddings.
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
    """Return AdamW as a chain. Vectors, biases and position embeddings are not decayed
    (`modeling/parameter_kinds.py`)."""
    return chain(ScaleByAdam(*betas, eps), AddDecayedWeights(weight_decay), scale_by_learning_rate(lr))


class AdamW(Technique):
    """Differs from the paper: the decay factor is lr · weight_decay, as in torch. The paper multiplies the weight decay
    by the schedule's factor alone."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 1e-3
    betas: Betas = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: Rate = 0.1

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(adamw(self.lr, self.betas, self.eps, self.weight_decay), transform)
