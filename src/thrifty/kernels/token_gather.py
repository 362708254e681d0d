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
    """Return `total` tokens (b, t, d): `tokens` (b, n, d) at positions (b, n), `absent` (1, 1 or t, d) at all other
    positions."""
    rows = absent.to(tokens.dtype).expand(len(tokens), total, -1)
    return rows.scatter(1, places[..., None].expand_as(tokens), tokens)
