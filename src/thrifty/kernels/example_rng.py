"""Random numbers per example: a pure function of (seed, example index), independent of earlier random numbers.

Each example has a 64-bit key. The generator SplitMix64 (Steele et al. 2014, Fast Splittable Pseudorandom Number
Generators), seeded with the key, produces the example's random numbers. Any of them can be computed without the earlier
numbers.
"""

import hashlib

import numpy as np

from thrifty.kernels.keyed_permutation import mix_bits

_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def example_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return a random key per example, int64 (b,). A key depends on `seed` and the example's index in `numbers`
    (b,)."""
    start = int.from_bytes(hashlib.blake2b(f"examples/{seed}".encode(), digest_size=8).digest())
    return mix_bits(np.uint64(start) + (numbers.astype(np.uint64) + np.uint64(1)) * _STRIDE).view(np.int64)


def random_integers(keys: np.ndarray, count: int, skip: int = 0) -> np.ndarray:
    """Return the random integers with indices `skip` … `skip` + `count` - 1 of each key (b,): (b, count) in uint64."""
    steps = np.arange(skip + 1, skip + count + 1, dtype=np.uint64) * _STRIDE
    return mix_bits(keys.view(np.uint64)[:, None] + steps)


def random_fractions(numbers: np.ndarray) -> np.ndarray:
    """Convert random integers to uniform float64 numbers in [0, 1)."""
    return (numbers >> np.uint64(11)) * 2.0**-53


def random_subset(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions (b, count), ascending, of the `count` smallest random numbers in each row of (b, n)."""
    return np.sort(np.argpartition(scores, count - 1, axis=1)[:, :count], axis=1)
