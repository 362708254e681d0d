"""Rotary position embedding, in the half-split layout of Llama checkpoints.

Paper: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34. Channel i of the first half is paired with channel i
of the second half; GGUF files and the original release pair neighbours instead and need a permutation on import.
"""

import torch
from torch import Tensor


def rotary_table(length: int, head_width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (t, k/2) in float32, for positions 0 … t-1."""
    exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), base**-exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels of x (..., t, k) by its position's angle; the dtype of x is kept."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
