"""Random numbers per example in torch, on the batch's device. They are bit-identical to the random numbers of
`kernels/example_rng.py`.

The generator is SplitMix64 (Steele et al. 2014). torch has no unsigned arithmetic, so numbers are stored as int64.
Signed and unsigned integers have the same bits in sums and products; only shifts and comparisons differ.
"""

import torch
from torch import Tensor

_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_LOWEST = -(2**63)


def random_integers_torch(keys: Tensor, count: int) -> Tensor:
    """Return the first `count` random numbers of each key (b,) int64, as (b, count) in int64."""
    steps = torch.arange(1, count + 1, device=keys.device) * _STRIDE
    return _mixed(keys[:, None] + steps)


def random_subset_torch(scores: Tensor, count: int) -> Tensor:
    """Return the positions (b, count), ascending, of the `count` smallest scores in each row of (b, n). Scores are
    compared as unsigned integers.
    """
    places = (scores ^ _LOWEST).topk(count, dim=1, largest=False).indices
    return places.sort(dim=1).values


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FACTORS[0]
    z = (z ^ _shifted(z, 27)) * _FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
