"""Tokens taken from their places in a sequence, and put back. Shapes: b batch, t tokens, n of them, d width."""

from torch import Tensor


def gather_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens (b, n, d) at places (b, n) of (b, t, d)."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))


def scatter_tokens(tokens: Tensor, places: Tensor, absent: Tensor, total: int) -> Tensor:
    """`total` tokens (b, t, d): those given (b, n, d) at their places (b, n), `absent` (1, 1 or t, d) everywhere
    else."""
    rows = absent.to(tokens.dtype).expand(len(tokens), total, -1)
    return rows.scatter(1, places[..., None].expand_as(tokens), tokens)
