"""Tokens taken from their places in a sequence, and put back. Shapes: b batch, t tokens, n of them, d width."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens (b, n, d) at places (b, n) of (b, t, d)."""
    rows = places + tokens.shape[1] * torch.arange(len(places), device=places.device)[:, None]
    # the backward pass of a gather would hold 16-bit tokens as float32 too, on a processor
    return F.embedding(rows, tokens.flatten(0, 1))


def scatter_tokens(tokens: Tensor, places: Tensor, absent: Tensor, total: int) -> Tensor:
    """`total` tokens (b, t, d): those given (b, n, d) at their places (b, n), `absent` (1, 1 or t, d) everywhere
    else."""
    rows = absent.to(tokens.dtype).expand(len(tokens), total, -1)
    return rows.scatter(1, places[..., None].expand_as(tokens), tokens)
