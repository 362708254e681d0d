"""Randomness that is a function of a name, not of what was drawn before."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_of(key: str) -> int:
    """A 56-bit seed from any text."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())


def keyed_generator(key: str, like: Tensor | None = None) -> torch.Generator:
    """A generator that starts from `key` alone, on the device of `like` (the CPU without)."""
    return torch.Generator(device=like.device if like is not None else "cpu").manual_seed(seed_of(key))


def start_draws(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators that are used where none is named: Python's, NumPy's, torch's on the CPU, and those of all
    devices of the kind of `device`.

    `torch.manual_seed` does this for every kind of device, and formats a stack trace for each that is not in use.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    if device is not None and device.type not in ("cpu", "meta"):
        kind = torch.get_device_module(device)
        # of several, the current one need not be this one
        getattr(kind, "manual_seed_all", kind.manual_seed)(seed)


class GeneratorStates:
    """States of the generators that are used where none is named: Python's, NumPy's, torch's on the CPU and on these
    devices, as far as this machine has them."""

    def __init__(self, devices: Iterable[torch.device] = ()):
        self._host = random.getstate(), np.random.get_state(), torch.get_rng_state()
        modules = {device: torch.get_device_module(device) for device in devices if device.type not in ("cpu", "meta")}
        self._devices = {device: kind.get_rng_state(device) for device, kind in modules.items() if kind.is_available()}

    def put_back(self) -> None:
        """Give the generators these states."""
        python, numpy, cpu = self._host
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the generators these states, and at the end of the block those that they had before it."""
        before = GeneratorStates(self._devices)
        self.put_back()
        try:
            yield
        finally:
            before.put_back()


def preserved_draws(tensors: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
    """Leave the generators as the block found them, those of the tensors' devices too."""
    return GeneratorStates({tensor.device for tensor in tensors}).restored()
