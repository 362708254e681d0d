"""What is drawn without a generator starts from the step; kernels with a fixed order are chosen on a GPU for a run."""

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


def test_a_gpu_is_asked_for_them_as_long_as_the_block_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with deterministic_kernels(GPU):
        assert os.environ[WORKSPACE] == ":4096:8"
        assert asked() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_processor_and_a_recipe_that_does_not_want_them_are_left_alone() -> None:
    for device, wanted in ((CPU, True), (GPU, False)):
        before = asked()
        with deterministic_kernels(device, wanted):
            assert asked() == before


def test_an_operation_without_such_a_kernel_is_refused_with_what_to_set() -> None:
    with pytest.raises(ThriftyError) as refused, deterministic_kernels(GPU):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set\nmore")
    assert "cumsum_cuda_kernel" in refused.value.what and "deterministic=false" in (refused.value.fix or "")


def test_other_errors_come_through_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), deterministic_kernels(GPU):
        raise RuntimeError("out of memory")


def test_draws_on_the_processor_start_as_torch_itself_starts_them() -> None:
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    torch.rand(3)
    start_draws(7, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), expected)


def test_draws_of_python_and_numpy_start_there_too() -> None:
    drawn = []
    for _ in range(2):
        start_draws(2**55 + 7, torch.device("cpu"))
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_device_that_is_not_the_current_one_of_its_kind_starts_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind with two devices, of which the first is the current one, as a process that chose none has it."""
    seeds = [0, 0]
    kind = SimpleNamespace(
        manual_seed=lambda seed: seeds.__setitem__(0, seed),
        manual_seed_all=lambda seed: seeds.__setitem__(slice(None), [seed] * 2),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: kind)
    start_draws(7, torch.device("cuda", 1))
    assert seeds == [7, 7]
