"""Gathering and scattering of tokens by position. Shapes: b batch, t tokens, n selected tokens, d width."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """Return the tokens (b, n, d) of (b, t, d) at positions (b, n)."""
    rows = places + tokens.shape[1] * torch.arange(len(places), device=places.device)[:, None]
    # on a CPU, the backward pass of torch.gather would also store 16-bit tokens as float32
    return F.embedding(rows, tokens.flatten(0, 1))


def scatter_tokens(tokens: Tensor, places: Tensor, absent: Tensor, total: int) -> Tensor:
    """Return sequences (b, t, d) of t = `total` tokens, with `tokens` (b, n, d) at the positions `places` (b, n).

    All other positions contain `absent`, of shape (1, 1, d) or (1, t, d).
    """
    rows = absent.to(tokens.dtype).expand(len(tokens), total, -1)
    return rows.scatter(1, places[..., None].expand_as(tokens), tokens)
