"""Where what is drawn without a generator starts from."""

from types import SimpleNamespace

import pytest
import torch

from thrifty.core.randomness import start_draws


def test_draws_on_the_processor_start_as_torch_itself_starts_them() -> None:
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    torch.rand(3)
    start_draws(7, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), expected)


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
