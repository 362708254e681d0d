"""Adding a product of two thin matrices to what a layer gives, without ever forming the product."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_low_rank(result: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return result + scale · x Aᵀ Bᵀ for result (..., out), x (..., in), A (rank, in), B (out, rank).

    The wide result is passed over few times: the second product starts from it, and the scale falls on thin matrices.
    Autograd keeps x and x Aᵀ.

    Computes in the dtype of the factors, under autocast in that of products; gives the dtype of `result`.
    """
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(a.dtype)
    thin = F.linear(x, a)
    if result.dtype != thin.dtype:  # the wider of the two decides, so that nothing of `result` is rounded on the way
        return (result + F.linear(thin * scale, b)).to(result.dtype)
    added = torch.addmm(result.reshape(-1, b.shape[0]), thin.reshape(-1, b.shape[1]), b.T, alpha=scale)
    return added.view(result.shape)


def low_rank_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · B A (out, in), at least in float32: in 16 bits a small addition loses what the weight cannot show."""
    precise = torch.promote_types(a.dtype, torch.float32)
    return b.to(precise) @ a.to(precise) * scale


def on_diagonal(b: Tensor, sizes: tuple[int, ...], chosen: tuple[int, ...]) -> Tensor:
    """B of several layers fused into one, each behind an A of its own, as one matrix for all thin results together.

    `sizes` are the widths that the layers give; `chosen` of them have factors, whose B are stacked in `b` (sum of the
    chosen sizes, rank). Gives (sum of sizes, rank times chosen): B on the diagonal, zeros where a layer has none.
    """
    stacked = dict(zip(chosen, b.split([sizes[index] for index in chosen]), strict=True))
    return torch.block_diag(*(stacked.get(i, b.new_empty(size, 0)) for i, size in enumerate(sizes)))
