"""RigL (Evci et al. 2020): train sparse and move connections to where the gradient is largest.

Paper       Evci et al. 2020, Rigging the Lottery (arXiv 1911.11134), algorithm 1; ERK densities, section 3.
Promise     A constant number of nonzero weights per layer. One step in `every` drops the smallest weights and grows the
            inactive weights with the largest dense gradient.
Use         model, optimizer = thrifty.apply((model, optimizer), "rigl", density=0.2, total_steps=10_000)
Start with  `rigl:density=0.2,every=100`. SViTE (arXiv 2106.04533) uses AdamW, alpha=0.5, until=0.8 and a large `every`.
Cost        One boolean mask per weight matrix. A step that drops and grows connections makes no other update.
Avoid       Frozen base weights, as under adapters.
Does not    Save time by itself, because matmuls stay dense; sparsity.sparse_products can skip masked weights.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from thrifty.optim.mask_selection import replace_connections
from thrifty.optim.weight_masks import LayerReader
from thrifty.techniques.sparsity._mask_techniques import DynamicMaskTechnique


def moved_mask(mask: Tensor, weight: Tensor, gradient: Tensor, fraction: float) -> Tensor:
    """Return the mask after a drop-and-grow step. All tensors have the weight's shape.

    The `fraction` of active connections with the smallest |weight| is dropped. The same number of inactive connections,
    with the largest |gradient|, is grown. Connections that were just dropped count as inactive.
    """
    return replace_connections(mask, weight.abs(), gradient.abs(), fraction)


class Rigl(DynamicMaskTechnique):
    """The fraction of moved connections anneals by cosine, as in the paper's text. The paper's code uses a constant
    fraction by default. Biases, norms, embeddings and the head stay dense. Clipping by the global norm uses the masked
    gradients only.

    New connections start with zero moments, and Adam's bias correction uses the run's step count, as in the paper. Late
    in a run, Adam's first update of a new connection is therefore (1 - beta1) / sqrt(1 - beta2) times the usual update.
    With betas of 0.9 and 0.999 the factor is 3.16, and grows to 6.6 after a dozen equal gradients. With a beta2 of 0.95
    it is 0.45.
    """

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            matrix = layer(name)
            yield name, moved_mask(matrix.mask, matrix.weight, matrix.gradient, self.fraction(step))
