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


def start_draws(seed: int, device: torch.device) -> None:
    """What is drawn without a generator, on the processor and on all devices of this one's kind, starts from here.

    `torch.manual_seed` does this for every kind of device, and formats a stack trace for each that is not in use.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        kind = torch.get_device_module(device)
        # of several, the current one need not be this one
        getattr(kind, "manual_seed_all", kind.manual_seed)(seed)
