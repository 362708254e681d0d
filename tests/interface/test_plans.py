"""Plans of a model and data of the user's own: what refuses them is named, and nothing is ignored."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import thrifty
from thrifty.core.errors import UsageError


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_plans_list_techniques_that_refuse_model_or_batches() -> None:
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    work: Any = dict(model=model, data=data, held_out=data, loss=loss, budget=4, batch=32, quiet=True)
    rejected = thrifty.plan(**work, techniques=[thrifty.AdamW()], allow="different", probe=False).rejected
    for name in ("attention.a3", "curriculum.resolution", "growth.layer_drop"):
        assert rejected[name].startswith(f"refused: {name}"), rejected[name]
    assert "only a comparison shows" in rejected["averaging.ema"]


@pytest.mark.parametrize("probing", [{"probe": True}, {"probe": False}, {"seconds": 9.0}, {"probed_candidates": 4}])
def test_a_plan_for_a_cluster_refuses_settings_of_probes(probing: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="steps on a cluster are simulated"):
        thrifty.plan("text", cluster="h100-box", **probing)


def test_predicted_steps_have_the_order_of_the_candidates() -> None:
    """The expected slowdown of an option counts, such as the transfers of offloaded activations."""
    inputs = torch.randn(4096, 128)
    blocks = [nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(12)]
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(*blocks))
    work: Any = dict(model=model, data=data, held_out=data, loss=loss, budget=4, batch=4096, quiet=True, probe=False)
    whole = thrifty.plan(**work).forecast
    candidates = thrifty.plan(**work, memory=whole.process + 0.75 * whole.memory.value).plan.alternatives  # type: ignore[union-attr]
    steps = [forecast.step.value for _, forecast in candidates]
    expected = [candidate.relative for candidate, _ in candidates]
    assert len({*expected}) > 1 and steps == sorted(steps)
    assert [step / steps[0] for step in steps] == pytest.approx([each / expected[0] for each in expected], rel=0.01)


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ({}, "exact"),
        ({"ranks": 1}, "exact"),
        ({"ranks": 2}, "rounding"),
        ({"cluster": "h100-box"}, "rounding"),
        ({"cluster": "h100-box", "ranks": 1}, "exact"),
        ({"cluster": "h100-box", "allow": "exact"}, "exact"),
    ],
)
def test_several_ranks_allow_rounding_by_default(
    place: dict[str, Any], allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []
    for name in ("plan_on_machine", "plan_on_cluster"):
        monkeypatch.setattr(f"thrifty.interface.plans.{name}", lambda recipe, wanted, *_, **__: requests.append(wanted))
    thrifty.plan("text", data="kjv", **place)
    assert requests[0].allow.value == allowed
