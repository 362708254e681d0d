"""`device = "mps"` by what torch reports: no such GPU is here."""

from collections.abc import Iterator

import pytest
import torch

from thrifty.core.errors import UsageError
from thrifty.machine.machine_info import free_memory
from thrifty.training import rank_setup
from thrifty.training.determinism import unordered_kernels
from thrifty.training.memory_meter import MemoryMeter

MPS = torch.device("mps")


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_mps_without_such_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match='device = "mps", but torch finds no GPU of an Apple chip'):
        rank_setup.choose_device("mps")
    with pytest.raises(UsageError, match="unknown device 'mpz'\n  fix: did you mean 'mps'"):
        rank_setup.choose_device("mpz")


@pytest.mark.usefixtures("apple")
def test_mps_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_setup.choose_device("mps") == MPS
    assert rank_setup.choose_device("auto").type == "cpu"


@pytest.mark.usefixtures("apple")
def test_mps_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_setup, "ranks", lambda: 2)
    with pytest.raises(UsageError, match="allows '1' rank"):
        rank_setup.choose_device("mps")


def test_memory_of_mps_is_what_torch_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: Iterator[int] = iter([100, 400, 150, 300])
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(allocated))
    meter = MemoryMeter(MPS)
    assert [meter.now(), meter.now(), meter.peak()] == [300, 50, 300] and meter.process == 0
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    assert free_memory(MPS) == 900


def test_a_run_on_mps_says_that_its_kernels_have_no_order() -> None:
    assert "may differ from an uninterrupted run by rounding" in unordered_kernels(MPS)
    assert unordered_kernels(torch.device("cpu")) == unordered_kernels(torch.device("cuda")) == ""


def test_autocast_runs_on_mps() -> None:
    """torch has autocast in both 16-bit formats for this device."""
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("mps", dtype):
            assert torch.is_autocast_enabled("mps") and torch.get_autocast_dtype("mps") == dtype
