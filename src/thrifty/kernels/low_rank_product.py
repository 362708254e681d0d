"""Low-rank additions to a layer's output. `add_low_rank` never forms the full matrix B A."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_low_rank(result: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return result + scale · x Aᵀ Bᵀ, for result (..., out), x (..., in), A (rank, in), B (out, rank).

    Few passes over the wide result are required, because the second matmul accumulates into it and includes the scale.
    Autograd saves x and x Aᵀ. The computation uses the dtype of A and B, or the autocast dtype. The result has the
    dtype of `result`.
    """
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(a.dtype)
    thin = F.linear(x, a)
    if result.dtype != thin.dtype:  # add in the wider dtype, so that `result` is not rounded before the sum
        return (result + F.linear(thin * scale, b)).to(result.dtype)
    added = torch.addmm(result.reshape(-1, b.shape[0]), thin.reshape(-1, b.shape[1]), b.T, alpha=scale)
    return added.view(result.shape)


def low_rank_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale · B A (out, in), in float32 or wider, because 16 bits would round small additions away."""
    precise = torch.promote_types(a.dtype, torch.float32)
    return b.to(precise) @ a.to(precise) * scale


def on_diagonal(b: Tensor, sizes: tuple[int, ...], chosen: tuple[int, ...]) -> Tensor:
    """Return one block-diagonal B for several layers that are fused into one, each with its own A.

    `sizes` are the layers' output widths. Only the `chosen` layers have factors; their B are stacked in `b` (sum of
    chosen sizes, rank). The result is (sum of sizes, rank times the number of chosen layers), with zeros for the other
    layers.
    """
    stacked = dict(zip(chosen, b.split([sizes[index] for index in chosen]), strict=True))
    return torch.block_diag(*(stacked.get(i, b.new_empty(size, 0)) for i, size in enumerate(sizes)))
