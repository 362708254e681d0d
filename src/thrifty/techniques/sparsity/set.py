"""SET: train at a fixed density, replacing the weakest connections by random ones.

Paper     Mocanu et al. 2018, Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity (arXiv
          1707.04780); Erdős–Rényi densities are from there.
Promise   the same number of non-zero weights per layer at every step, and no dense gradient needed: what RigL's choice
          of where to grow is worth is the difference to this.
Cost      as sparsity.rigl's.
Avoid     at very low densities, where random growth hardly ever meets a connection that matters.
Note      moves are sparsity.rigl's but for where connections grow: the smallest by magnitude are dropped (the paper
          drops the smallest positive and the largest negative apart), growth is at zero, the share anneals by cosine
          and a step that moves makes no other update. Places are drawn from (seed, name, step) alone.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thrifty.core.randomness import keyed_generator
from thrifty.optim.mask_selection import replace_connections
from thrifty.optim.weight_masks import LayerReader
from thrifty.techniques.sparsity._mask_techniques import DynamicMaskTechnique


def regrown_mask(mask: Tensor, weight: Tensor, fraction: float, key: str) -> Tensor:
    """The mask after dropping the `fraction` smallest |weight| of the active and growing as many inactive places
    (just-dropped ones included), each with the same chance, drawn from `key` alone. Both have the weight's shape."""
    chance = torch.rand(mask.shape, generator=keyed_generator(key), dtype=torch.float64).to(mask.device)
    return replace_connections(mask, weight.abs(), chance, fraction)


class SparseEvolution(DynamicMaskTechnique):
    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            matrix = layer(name)
            yield name, regrown_mask(matrix.mask, matrix.weight, self.fraction(step), f"{self.seed}/{name}/{step}")
