"""Random generators seeded by a key, independent of earlier random numbers, and states of the global generators."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_of(key: str) -> int:
    """Return a 56-bit seed from any text."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())


def keyed_generator(key: str, like: Tensor | None = None) -> torch.Generator:
    """Return a generator seeded by `key` alone, on the device of `like` (by default the CPU)."""
    return torch.Generator(device=like.device if like is not None else "cpu").manual_seed(seed_of(key))


def start_draws(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of Python, NumPy and torch, for the CPU and all devices of the type of `device`.
    `torch.manual_seed` would also seed every other device type, and format a stack trace for each unused type."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    if device is not None and device.type not in ("cpu", "meta"):
        kind = torch.get_device_module(device)
        # all devices of this type, because the current device may be another
        getattr(kind, "manual_seed_all", kind.manual_seed)(seed)


class GeneratorStates:
    """States of the global generators of Python, NumPy and torch, for the CPU and the available `devices`."""

    def __init__(self, devices: Iterable[torch.device] = ()):
        self._host = random.getstate(), np.random.get_state(), torch.get_rng_state()
        modules = {device: torch.get_device_module(device) for device in devices if device.type not in ("cpu", "meta")}
        self._devices = {device: kind.get_rng_state(device) for device, kind in modules.items() if kind.is_available()}

    def put_back(self) -> None:
        """Restore all generators to the stored states."""
        python, numpy, cpu = self._host
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Use the stored states inside the block, and restore the present states afterwards."""
        before = GeneratorStates(self._devices)
        self.put_back()
        try:
            yield
        finally:
            before.put_back()


def preserved_draws(tensors: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
    """Restore the global generators after the block, including the generators of the tensors' devices."""
    return GeneratorStates({tensor.device for tensor in tensors}).restored()


def draws_of_caller(device: str) -> AbstractContextManager[None]:
    """Restore the global generators after work on a device, such as "auto" or "cpu", including those of all GPUs that
    the process uses."""
    uses_gpus = torch.cuda.is_initialized() or (device.startswith(("auto", "cuda")) and torch.cuda.is_available())
    return GeneratorStates(torch.device("cuda", n) for n in range(torch.cuda.device_count() * uses_gpus)).restored()
