"""ViTCoD filter: one fixed mask per head, computed from average attention maps, and an autoencoder over heads.

Paper: You et al. 2023, ViTCoD: Vision Transformer Acceleration via Dedicated Algorithm and Accelerator Co-Design (HPCA,
arXiv 2210.09573). The paper was read in part, together with its published code.
"""

import base64
import math
import zlib

import numpy as np
import torch
from torch import Tensor

from thrifty.core.errors import IntegrityError
from thrifty.kernels.attention_filters.keep_masks import heads_of_keys
from thrifty.kernels.deterministic_cumsum import running_sums
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.kernels.sparse_attention.block_grid import BlockGrid, blocks_of

GLOBAL = 50
"""Threshold of global tokens: a key that is kept by more than this number of queries is global. The paper's images have
197 tokens.
"""


def encode_heads(heads: int) -> int:
    """Return the number of encoded heads: half of the heads, rounded up."""
    return math.ceil(heads / 2)


def autoencode_heads(x: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """Return x (b, h, t, k), encoded to c heads and decoded to h heads, with encode (c, h) and decode (h, c)."""
    return torch.einsum("hc,cg,bgtk->bhtk", decode, encode, x)


def autoencoder_loss(x: Tensor, restored: Tensor) -> Tensor:
    """Return the L2 distance of x and restored (b, h, t, k), one value per example (b,)."""
    return (x - restored).float().square().sum((1, 2, 3)).add(1e-12).sqrt()


def informative_pairs(average: Tensor, cut: float, first: int = 1) -> Tensor:
    """Return a mask of the largest entries of each row of average attention maps (…, t, s), until their sum reaches
    `cut`. Rows must sum to 1. Rows and columns of the `first` tokens are always kept.
    """
    ordered = average.sort(dim=-1, descending=True, stable=True)
    before = running_sums(ordered.values, -1) - ordered.values
    kept = torch.zeros_like(average, dtype=torch.bool).scatter(-1, ordered.indices, before < cut)
    kept[..., :first, :] = True
    kept[..., :, :first] = True
    return kept


def average_map(probabilities: Tensor, visible: Tensor) -> Tensor:
    """Return the mean (h, t, s) of probabilities (b, h, t, s) over the examples in which the query sees a key."""
    counts = visible.any(-1, keepdim=True).expand(*probabilities.shape[:3], 1).sum(0)
    return probabilities.double().sum(0) / counts.clamp(min=1)


def fixed_masks(average: Tensor, cut: float, first: int) -> Tensor:
    """Return the `informative_pairs` of maps (h, t, t), plus the diagonal. Rows are first scaled to a sum of 1.

    The diagonal is our addition, so that each query keeps a key.
    """
    rows = average / average.sum(-1, keepdim=True).clamp(min=1e-30)
    diagonal = torch.eye(average.shape[-1], dtype=torch.bool, device=average.device)
    return informative_pairs(rows, cut, first) | diagonal


def written_masks(masks: Tensor) -> str:
    """Return masks (h, t, t) as text: their bits, compressed and base64-encoded."""
    return base64.b64encode(zlib.compress(np.packbits(masks.cpu().numpy()).tobytes())).decode()


def read_masks(text: str, heads: int, tokens: int) -> np.ndarray:
    """Return masks (h, t, t) from the text of `written_masks`. Raise IntegrityError if the number of bits differs."""
    count = heads * tokens**2
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8))
    if not count <= len(bits) < count + 8:
        raise IntegrityError(f"the masks have {len(bits)} bits, but {heads} heads of {tokens} tokens require {count}")
    return bits[:count].reshape(heads, tokens, tokens).astype(bool)


def split_blocks(masks: np.ndarray, limit: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of tokens per head (h, t), global tokens first, and the nonempty blocks (h, T, T) in this
    order.

    `masks` are (h, t, t), and `block` is the number of tokens per block.
    """
    tokens = masks.shape[-1]
    order = (masks.sum(1) <= limit).argsort(axis=-1, kind="stable")
    moved = np.take_along_axis(np.take_along_axis(masks, order[:, :, None], 1), order[:, None, :], 2)
    side = blocks_of(tokens, block)
    padded = np.pad(moved, ((0, 0), *[(0, side * block - tokens)] * 2))
    return order, padded.reshape(-1, side, block, side, block).any((2, 4))


def split_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, order: Tensor, kept: BlockGrid, dropout: float = 0.0
) -> Tensor:
    """Return attention of q (b, h, t, k) over k and v (b, g, t, k) with a mask (b or 1, h, t, t).

    Tokens of each head are processed in `order` (h, t). Only nonempty blocks (1, h, T, T) of this order are computed.
    """
    b, h = q.shape[:2]
    along = order[None, :, :, None].expand(b, -1, -1, -1)
    q, k, v = (heads_of_keys(x, h).gather(2, along.expand(-1, -1, -1, x.shape[-1])) for x in (q, k, v))
    keep = keep.gather(2, order[None, :, :, None].expand_as(keep)).gather(3, order[None, :, None].expand_as(keep))
    out = block_attention(q, k, v, kept, keep, dropout=dropout)
    return out.gather(2, order.argsort(-1)[None, :, :, None].expand_as(out))
