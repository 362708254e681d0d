"""Global random generators are seeded at each step; deterministic kernels are selected on a GPU during a run."""

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from thrifty.core.errors import ThriftyError
from thrifty.core.randomness import start_draws
from thrifty.training.determinism import WORKSPACE, deterministic_kernels

GPU, CPU = torch.device("cuda"), torch.device("cpu")
asked = torch.are_deterministic_algorithms_enabled


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = asked()
    yield
    assert asked() == before


def test_deterministic_kernels_are_on_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with deterministic_kernels(GPU):
        assert os.environ[WORKSPACE] == ":4096:8"
        assert asked() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_cpu_and_deterministic_false_change_nothing() -> None:
    for device, wanted in ((CPU, True), (GPU, False)):
        before = asked()
        with deterministic_kernels(device, wanted):
            assert asked() == before


def test_an_operation_without_such_a_kernel_is_refused() -> None:
    with pytest.raises(ThriftyError) as refused, deterministic_kernels(GPU):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set\nmore")
    assert "cumsum_cuda_kernel" in refused.value.what and "deterministic=false" in (refused.value.fix or "")


def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), deterministic_kernels(GPU):
        raise RuntimeError("out of memory")


def test_cpu_seed_equals_torch_manual_seed() -> None:
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    torch.rand(3)
    start_draws(7, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), expected)


def test_python_and_numpy_are_seeded_too() -> None:
    drawn = []
    for _ in range(2):
        start_draws(2**55 + 7, torch.device("cpu"))
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_device_that_is_not_current_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with two devices, where the first is the current one, as in a process that selected none."""
    seeds = [0, 0]
    kind = SimpleNamespace(
        manual_seed=lambda seed: seeds.__setitem__(0, seed),
        manual_seed_all=lambda seed: seeds.__setitem__(slice(None), [seed] * 2),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: kind)
    start_draws(7, torch.device("cuda", 1))
    assert seeds == [7, 7]
