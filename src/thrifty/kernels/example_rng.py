"""Random numbers per example: a pure function of (seed, index of the example), independent of earlier random numbers.

An example has a key of 64 bits. The random numbers of a key are those of the generator SplitMix64 (Steele et al. 2014,
Fast Splittable Pseudorandom Number Generators) started from it. Each can be computed without the earlier ones.
"""

import hashlib

import numpy as np

from thrifty.kernels.keyed_permutation import mix_bits

_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def example_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the keys (b,) of the examples with these indices (b,) in a run; int64, all bits in use."""
    start = int.from_bytes(hashlib.blake2b(f"examples/{seed}".encode(), digest_size=8).digest())
    return mix_bits(np.uint64(start) + (numbers.astype(np.uint64) + np.uint64(1)) * _STRIDE).view(np.int64)


def random_integers(keys: np.ndarray, count: int, skip: int = 0) -> np.ndarray:
    """Return the random numbers `skip` … `skip` + `count` - 1 of each key (b,): uint64 (b, count)."""
    steps = np.arange(skip + 1, skip + count + 1, dtype=np.uint64) * _STRIDE
    return mix_bits(keys.view(np.uint64)[:, None] + steps)


def random_fractions(numbers: np.ndarray) -> np.ndarray:
    """Return random numbers as uniform ones in [0, 1), float64."""
    return (numbers >> np.uint64(11)) * 2.0**-53


def random_subset(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the `count` smallest of each row of random numbers (b, n), ascending: (b, count)."""
    return np.sort(np.argpartition(scores, count - 1, axis=1)[:, :count], axis=1)
