"""Static sparse training (Evci et al. 2020): train under masks that are fixed before training.

Paper       Evci et al. 2020 (arXiv 1911.11134), baseline "Static"; Liu et al. 2022, The Unreasonable Effectiveness of
            Random Pruning (arXiv 2202.02643).
Promise     The same mask of the given density at every step. Static masks are the baseline for techniques that score
            weights or change masks.
Use         model, optimizer = thrifty.apply((model, optimizer), "static", density=0.2)
Start with  `static:density=0.2,distribution=erk`.
Cost        One boolean mask per weight matrix.
Avoid       `criterion=magnitude` with `distribution=global` at low densities, because layers with small initial values
            then lose all weights.
Does not    Save time by itself, because matmuls stay dense; sparsity.sparse_products can skip masked weights.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from thrifty.core.randomness import keyed_generator
from thrifty.core.shard_layout import order_of
from thrifty.core.state import TrainState, full_value
from thrifty.optim.mask_selection import (
    global_count,
    largest,
    largest_of_all,
    layer_counts,
    masked_shapes,
    random_masks,
    shard_like_parameter,
)
from thrifty.optim.weight_masks import check_masks
from thrifty.techniques.sparsity._mask_techniques import MatrixMaskTechnique


class StaticMask(MatrixMaskTechnique):
    """The metric "empty_weights" counts layers without remaining weights. In a fork of a dense run, masks are computed
    from the weights of the dense run. criterion = "magnitude" is then one-shot pruning followed by training."""

    criterion: Literal["random", "magnitude"] = "random"
    """Selection of the kept weights: random, or by magnitude of the initial values."""
    distribution: Literal["erk", "uniform", "global"] = "erk"
    """Density of each layer. With "global", the scores of all layers are compared instead."""
    seed: int = 0

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        shapes = masked_shapes(parameters)
        if self.distribution == "global":
            scores = {name: self._scores(name, parameter) for name, parameter in parameters.items()}
            masks = largest_of_all(scores, global_count(shapes, self.density))
        elif self.criterion == "magnitude":
            counts = layer_counts(shapes, self.density, self.distribution)
            masks = {name: largest(self._scores(name, parameters[name]), counts[name]) for name in parameters}
        else:
            return random_masks(parameters, self.density, self.distribution, self.seed)
        return {name: shard_like_parameter(masks[name], parameters[name]) for name in parameters}

    def _scores(self, name: str, parameter: Tensor) -> Tensor:
        if self.criterion == "magnitude":
            return full_value(parameter, order_of(parameter)).abs()
        return torch.rand(parameter.shape, generator=keyed_generator(f"{self.seed}/{name}"), dtype=torch.float64)

    def holds(self, state: TrainState) -> None:
        if self.distribution == "global":
            check_masks(self.name, state, {})
            self.check_total(state, self.density)
        else:
            check_masks(self.name, state, self.allowed(state, self.density, self.distribution))
