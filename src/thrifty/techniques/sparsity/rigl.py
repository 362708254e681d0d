"""RigL: train at a fixed density, moving connections to where the gradient wants them.

Paper     Evci et al. 2020, Rigging the Lottery (arXiv 1911.11134), algorithm 1; ERK densities, section 3.
Promise   the same number of non-zero weights per layer at every step. Drops the smallest active weights, grows the
          inactive ones with the largest dense gradient at zero, cosine-annealed; that step makes no other update.
Cost      one more mask per weight. Masked dense products save no time: FLOPs saved are theoretical until a sparse
          kernel is used.
Avoid     with frozen base weights.
Note      the paper's text anneals by cosine, its code's default is constant; this follows the text. Biases, norms,
          embeddings and the head stay dense. Global-norm clipping sees the masked gradients only. New connections start
          with moments of zero at the run's age, as in the paper. So the bias correction does not see that they are new:
          late in a run Adam's first update of one is (1 - beta1) / sqrt(1 - beta2) times the usual, 3.16 with betas of
          0.9 and 0.999 (2.5 measured at step 1000), and 6.6 after a dozen equal gradients; 0.45 with a beta2 of 0.95.
          SViTE (Chen et al. 2021, arXiv 2106.04533) is this with AdamW, alpha = 0.5, until = 0.8 and rare moves.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from thrifty.optim.mask_selection import replace_connections
from thrifty.optim.weight_masks import LayerReader
from thrifty.techniques.sparsity._mask_techniques import DynamicMaskTechnique


def moved_mask(mask: Tensor, weight: Tensor, gradient: Tensor, fraction: float) -> Tensor:
    """The mask after dropping the `fraction` smallest |weight| of the active and growing as many inactive places
    (just-dropped ones included) with the largest |gradient|. All tensors have the weight's shape."""
    return replace_connections(mask, weight.abs(), gradient.abs(), fraction)


class Rigl(DynamicMaskTechnique):
    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            matrix = layer(name)
            yield name, moved_mask(matrix.mask, matrix.weight, matrix.gradient, self.fraction(step))
