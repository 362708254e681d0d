"""Kernels that give the same bits each time are asked for on a GPU while a run lasts; after it all is as it was."""

import os
from collections.abc import Iterator

import pytest
import torch

from thrifty.core.errors import ThriftyError
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
