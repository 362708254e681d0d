"""Block-sparse attention: blocks of tokens attend to their neighbours, to the first blocks and to some drawn at random.

Paper     Zaheer et al. 2020, BigBird (arXiv 2007.14062), sections 2 and 3.
Promise   time and memory of attention grow with tokens times kept blocks. Equal to attention under the same mask,
          gradients included.
Cost      quality, where what matters lies in blocks that are left out.
Avoid     below some 2,000 tokens, and where half of the blocks or more are kept.
Note      at density 1/8, float32, 4 heads of 64, two quiet cores, as the command line has threads wait: forward and
          backward pass took 0.29 (causal 0.43) of the time of torch's attention at 2,048 tokens, 0.27 (0.39) at 4,096,
          0.49 (0.40) at 8,192, and 0.79 to 0.84 of its bytes at the peak (`benchmarks/bench_sparse_attention.py`).
          Products are small: threads that sleep at once while they wait (OMP_WAIT_POLICY=PASSIVE alone) make it three
          times slower, and so does other work on the same cores.
          Drawn blocks are the same for all heads and differ from block to block of the model; they follow from `seed`,
          their places and the module's name; those of a decoder are the same in a longer text. On GPUs the same
          products run in torch; there is no kernel of their own for them yet.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from thrifty.core.randomness import seed_of
from thrifty.core.setting_bounds import Natural, Positive
from thrifty.kernels.attention_filters.keep_masks import refuse_other_lengths
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.kernels.sparse_attention.block_grid import scattered_grid
from thrifty.modeling.attention_sites import AttentionCore, AttentionSite
from thrifty.techniques.attention._replaced_attention import ReplacedAttention


def scattered_attention(
    block: int, near: int, first: int, drawn: int, causal: bool, seed: int, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of q (b, h, t, k) over k and v (b, g, t, k) in the blocks of a `scattered_grid`, as far as a boolean
    mask leaves them."""
    refuse_other_lengths(q.shape[2], k.shape[2])
    grid = scattered_grid(q.shape[2], block, near, first, drawn, causal, seed, q.device)
    return block_attention(q, k, v, grid, mask)


class BlockSparseAttention(ReplacedAttention):
    block: Positive = 64
    """Tokens of a block's side."""
    window_blocks: Natural = 1
    """Blocks on either side of its own that a block sees."""
    global_blocks: Natural = 1
    """Blocks at the beginning that all see, and that see all, or all before them."""
    random_blocks: Natural = 2
    """Further blocks, drawn at random."""
    seed: int = 0

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        seed = seed_of(f"{self.seed}/{place.name}") % 2**16
        sizes = self.block, self.window_blocks, self.global_blocks, self.random_blocks
        return partial(scattered_attention, *sizes, place.causal, seed)
