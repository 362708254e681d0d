"""SET (Mocanu et al. 2018): train sparse and replace the smallest connections by random ones.

Paper       Mocanu et al. 2018, Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity (arXiv
            1707.04780), which also introduces Erdős–Rényi densities.
Promise     A constant number of nonzero weights per layer, without dense gradients. SET is the random baseline for the
            growth criterion of RigL.
Use         model, optimizer = thrifty.apply((model, optimizer), "set", density=0.2, total_steps=10_000)
Start with  `set:density=0.2,every=100`.
Cost        One boolean mask per weight matrix. A step that drops and grows connections makes no other update.
Avoid       Very low densities, because random growth rarely reaches a connection that matters.
Does not    Save time by itself, because matmuls stay dense; sparsity.sparse_products can skip masked weights.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thrifty.core.randomness import keyed_generator
from thrifty.optim.mask_selection import replace_connections
from thrifty.optim.weight_masks import LayerReader
from thrifty.techniques.sparsity._mask_techniques import DynamicMaskTechnique


def regrown_mask(mask: Tensor, weight: Tensor, fraction: float, key: str) -> Tensor:
    """Return the mask after a drop-and-grow step, in the weight's shape.

    The `fraction` of active connections with the smallest |weight| is dropped. The same number of random inactive
    connections is grown. Connections that were just dropped count as inactive. The random values depend on `key` only.
    """
    random_scores = torch.rand(mask.shape, generator=keyed_generator(key), dtype=torch.float64).to(mask.device)
    return replace_connections(mask, weight.abs(), random_scores, fraction)


class SparseEvolution(DynamicMaskTechnique):
    """Connections are dropped as in sparsity.rigl, and new connections grow at random positions. New connections start
    at zero, and the moved fraction anneals by cosine. The random positions depend only on (seed, name, step). Differs
    from the paper: the smallest weights by magnitude are dropped. The paper drops the smallest positive and the largest
    negative weights separately."""

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            matrix = layer(name)
            yield name, regrown_mask(matrix.mask, matrix.weight, self.fraction(step), f"{self.seed}/{name}/{step}")
