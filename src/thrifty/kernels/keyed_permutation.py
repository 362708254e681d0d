"""A random permutation of n indices without a list of n: each position is computed on its own.

A Feistel network permutes the numbers below a power of four for any round function. Numbers outside 0 … n-1 pass
through it again until they fall inside ("cycle walking", Black and Rogaway 2002, Ciphers with Arbitrary Finite
Domains). The order is a pure function of the key, so that resuming requires only a position.
"""

import hashlib

import numpy as np

ROUNDS = 6


def permute(positions: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Return the permuted `positions` (b,), 0 … n-1, in the order of 0 … n-1 that `key` selects; int64."""
    half = max(1, (int(n - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    values = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Return a bijection of the numbers of 2 * half bits."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix_bits(right + key) & mask)
    return (left << shift) | right


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
