"""Rotary position embedding in the half-split layout of Llama checkpoints.

Paper: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34. Channel i of the first half is paired with channel i of
the second half. GGUF files and the original release pair neighboring channels instead, and must be permuted on import.
"""

import torch
from torch import Tensor


def rotary_frequencies(head_width: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return the frequencies of channel pairs in radians per position, (k/2,) in float32: base^(-2i/k)."""
    exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    return base**-exponent


def rotary_table(frequencies: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (t, k/2) in float32, for positions 0 … t-1."""
    positions = torch.arange(length, device=frequencies.device, dtype=torch.float32)
    angle = torch.outer(positions, frequencies)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each channel pair of x (…, t, k) by the angle of its position. The dtype of x is kept.

    The halves are swapped with a flip, not by slicing and concatenating. A compiler treats the flip as plain indexing,
    also in the backward pass. With concatenation, compiled code would compute both halves for every element.
    """
    halves = x.float().unflatten(-1, (2, -1))
    signed = torch.stack((-sin, sin), dim=-2)
    return (halves * cos[..., None, :] + halves.flip(-2) * signed).flatten(-2).to(x.dtype)
