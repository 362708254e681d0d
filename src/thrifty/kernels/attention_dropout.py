"""Dropout of attention weights that a backward pass can compute again.

Whether a weight is dropped is a hash of a seed and the weight's head, query and key. Kernels that compute parts of the
weights in different orders therefore drop the same weights, and save only the seed.
"""

import torch
from torch import Tensor

STRIDES = (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x14057B7EF767814F)
"""Odd multipliers of head, query and key."""
MIXERS = (0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53)
POSITIVE = 0x7FFFFFFFFFFFFFFF
BITS = 24


def draw_seed(device: torch.device) -> Tensor:
    """Return a random seed, int64 (1,), from torch's generator of the CPU."""
    return torch.randint(2**62, (1,)).to(device)


def dropout_factors(seed: Tensor, rate: float, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return factors of weights: 0 with probability `rate`, otherwise 1 / (1 - rate), in float32.

    `heads` (index among all examples and heads), `queries` and `keys` are int64 tensors whose shapes broadcast.
    """
    mixed = seed + heads * STRIDES[0] + queries * STRIDES[1] + keys * STRIDES[2]
    for shift, multiplier in zip((33, 29), MIXERS, strict=True):
        mixed = mixed & POSITIVE
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    mixed = mixed & POSITIVE
    uniform = (mixed ^ (mixed >> 32)) & (2**BITS - 1)
    return (uniform >= round(rate * 2**BITS)).to(torch.float32) * (1 / (1 - rate))
