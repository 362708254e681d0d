"""Randomness that is a function of a name, not of what was drawn before."""

import hashlib

import torch
from torch import Tensor


def seed_of(key: str) -> int:
    """A 56-bit seed from any text."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())


def keyed_generator(key: str, like: Tensor | None = None) -> torch.Generator:
    """A generator that starts from `key` alone, on the device of `like` (the CPU without)."""
    return torch.Generator(device=like.device if like is not None else "cpu").manual_seed(seed_of(key))
