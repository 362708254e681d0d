"""BigBird (Zaheer et al. 2020): restrict attention to neighboring, global and random blocks.

Paper       Zaheer et al. 2020, BigBird (arXiv 2007.14062), sections 2 and 3.
Promise     Time and memory of attention grow with tokens times kept blocks per query block. Outputs and gradients are
            as in dense attention with the same mask.
Use         model = thrifty.apply(model, "block_sparse", block=8)
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `block_sparse:block=64,window_blocks=1,random_blocks=2` for 2,048 tokens or more. Add global and window
            blocks if the loss rises.
Cost        Quality drops if relevant tokens lie in omitted blocks.
Avoid       Texts below about 2,000 tokens, and masks that keep half of the pairs or more, because dense attention can
            be as fast.
Does not    Use a special GPU kernel yet; on GPUs the matrix products of the blocks run as torch operations.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from thrifty.core.randomness import seed_of
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural, Positive
from thrifty.kernels.attention_filters.keep_masks import refuse_other_lengths
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.kernels.sparse_attention.block_grid import scattered_grid
from thrifty.modeling.attention_cores import LATER_HIDDEN, AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import ReplacedAttention


def scattered_attention(
    block: int, near: int, first: int, sampled: int, causal: bool, seed: int, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None = None, dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention in which queries see keys in neighboring blocks, in the first blocks and in random blocks.

    q and the result are (b, h, t, k), k and v are (b, g, t, k). A boolean mask excludes additional query-key pairs.
    """
    refuse_other_lengths(q.shape[2], k.shape[2])
    grid = scattered_grid(q.shape[2], block, near, first, sampled, causal, seed, q.device)
    return block_attention(q, k, v, grid, mask, dropout=dropout, bias=bias)


class BlockSparseAttention(ReplacedAttention):
    """Random blocks are the same for all heads and differ between layers. They depend on `seed`, the block's position
    and the module's name. In a decoder the random blocks stay the same when the text becomes longer.

    The matrix products are small, so the time to wake idle threads matters. If only OMP_WAIT_POLICY=PASSIVE is set,
    waiting threads sleep at once and attention is slower. Attention is also slower if other processes use the same
    cores.
    """

    block: Positive = 64
    """Side of a block in tokens."""
    window_blocks: Natural = 1
    """Number of visible blocks on each side of a block."""
    global_blocks: Natural = 1
    """Number of first blocks that attend to every block (in a decoder: every earlier block) and are visible to all."""
    random_blocks: Natural = 2
    """Number of additional visible blocks, chosen at random."""
    seed: int = 0

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        seed = seed_of(f"{self.seed}/{site.name}") % 2**16
        sizes = self.block, self.window_blocks, self.global_blocks, self.random_blocks
        if not site.causal and site.hides_later_keys:
            add_note(
                "some random blocks are later blocks, which the mask of the model hides; pass is_causal=True to "
                "torch.nn.functional.scaled_dot_product_attention to choose earlier blocks only"
            )
        if site.causal and not site.has_causal_masks:
            LATER_HIDDEN.set(site.module, self.name)
        return partial(scattered_attention, *sizes, site.causal, seed)
