"""SGD: the gradient, with momentum, as torch computes it.

Paper     Polyak 1964, momentum; Sutskever et al. 2013, the Nesterov form; large batches after Goyal et al. 2017,
          Accurate, Large Minibatch SGD (arXiv 1706.02677): Nesterov momentum 0.9, L2 of 1e-4 that spares norms.
Promise   the least optimizer state of all: one momentum per parameter, none with momentum = 0. Equal to
          torch.optim.SGD.
Avoid     for Transformers: it needs rates per kind of layer there; choose AdamW unless memory forbids.
Note      decay is L2, added to the gradient before the momentum, and spares vectors, biases and positions. The rate
          stands outside the momentum, so that a changing rate needs no momentum correction.
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
    """g += weight_decay · parameter; v = momentum · v + g; parameter -= lr · v, or lr · (g + momentum · v) with
    `nesterov`."""
    return chain(
        AddDecayedWeights(weight_decay) if weight_decay else GradientTransform(),
        ScaleByMomentum(momentum, nesterov) if momentum else GradientTransform(),
        scale_by_learning_rate(lr),
    )


class Sgd(Technique):
    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})

    lr: Rate = 0.1
    momentum: Probability = 0.9
    nesterov: bool = False
    weight_decay: Rate = 1e-4

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(sgd(self.lr, self.momentum, self.nesterov, self.weight_decay), transform)
