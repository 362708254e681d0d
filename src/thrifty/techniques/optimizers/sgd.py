"""SGD (Polyak 1964): follow the gradient with momentum, as torch computes it.

Paper       Polyak 1964 for momentum, Sutskever et al. 2013 for the Nesterov form, and Goyal et al. 2017 (arXiv
            1706.02677) for large batches.
Promise     The smallest optimizer state: one momentum per parameter, or none with `momentum=0`. Equal to
            torch.optim.SGD.
Use         optimizer = thrifty.optim.Sgd(model, lr=0.1, momentum=0.9)
Start with  `sgd:lr=0.1,momentum=0.9,nesterov=true`, as in Goyal et al. for convolutional networks.
Cost        One moment per parameter, 4 bytes in float32.
Avoid       Transformers, because their layers require different learning rates. Use AdamW unless its state does not fit
            in memory.
Does not    Adapt the learning rate to each parameter.
"""

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.setting_bounds import Probability, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleByMomentum, scale_by_learning_rate


def sgd(
    lr: float = 0.1, momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 1e-4
) -> GradientTransform:
    """Return SGD as a chain of transforms.

    g += weight_decay · w; v = momentum · v + g; w -= lr · v. With `nesterov`, w -= lr · (g + momentum · v).
    """
    return chain(
        AddDecayedWeights(weight_decay),
        ScaleByMomentum(momentum, nesterov) if momentum else GradientTransform(),
        scale_by_learning_rate(lr),
    )


class Sgd(Technique):
    """Weight decay is L2: it is added to the gradient before the momentum. The default is 1e-4, as in Goyal et al.
    Vectors, biases and position embeddings are not decayed. The learning rate multiplies the momentum, so a changing
    learning rate requires no momentum correction."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 0.1
    momentum: Probability = 0.9
    nesterov: bool = False
    weight_decay: Rate = 1e-4

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(sgd(self.lr, self.momentum, self.nesterov, self.weight_decay), transform)
