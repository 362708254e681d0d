"""Random permutation of n indices without storing n indices: each position is computed independently.

A Feistel network permutes the numbers below a power of four, for any round function. A number outside 0 … n-1 passes
through the network again until it is inside ("cycle walking", Black and Rogaway 2002, Ciphers with Arbitrary Finite
Domains). The order is a pure function of the key, so resuming requires only a position.
"""

import hashlib

import numpy as np

ROUNDS = 6


def permute(positions: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Return the entries (b,) in int64 at `positions` (b,) of a permutation of 0 … n-1. `key` selects the
    permutation."""
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
    """Map numbers of 2 * half bits by the bijection that `keys` select."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix_bits(right + key) & mask)
    return (left << shift) | right


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014). Every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
