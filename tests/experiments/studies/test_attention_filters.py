"""Study of attention filters: its expectations, and densities that match the masks."""

import pytest
import torch

from thrifty.experiments import studies
from thrifty.experiments.studies.attention_filters import SETTINGS, density_of, label_of, measure
from thrifty.experiments.study import Cells
from thrifty.experiments.study_summary import cells_of
from thrifty.experiments.tasks.language_task import llama
from thrifty.techniques.attention.window import WindowAttention

LOSSES = {"plain": 2.0, "wide": 2.01, "narrow": 2.02}
DENSITIES = {"plain": 100.0, "wide": 40.0, "narrow": 10.0}


def cells(of_blocks: float, narrow_window: float, losses: dict[str, float], densities: dict[str, float]) -> Cells:
    study = studies.make("attention_filters")
    measured = {}
    for model in ("text", "images"):
        measured[label_of(model, "plain"), 0] = {"loss": losses["plain"], "density": 100.0}
        for method, variants in SETTINGS.items():
            for name in variants:
                loss = losses[name]
                if name == "narrow":
                    loss = {"block-sparse": of_blocks, "window": narrow_window}.get(method, loss)
                kept = 20.0 if (method, name) == ("block-sparse", "narrow") else densities[name]
                measured[label_of(model, method, name), 0] = {"loss": loss, "density": kept}
    return cells_of(study, measured)[0]


def test_each_expectation_can_hold_and_can_fail() -> None:
    expected = studies.make("attention_filters").expect
    assert all(holds(cells(2.2, 2.05, LOSSES, DENSITIES)) for holds in expected.values())
    turned = {"plain": 2.0, "wide": 2.2, "narrow": 2.3}
    assert not any(holds(cells(2.1, 2.3, turned, DENSITIES | {"wide": 5.0})) for holds in expected.values())


def test_density_matches_a_window() -> None:
    model = WindowAttention(window=3, block=4).model(llama(1, 16, 12, 0))
    pairs = sum(min(i + 1, 3) for i in range(12))
    assert density_of(model, torch.zeros(2, 12, dtype=torch.int64)) == pytest.approx(pairs / 78)
    assert density_of(llama(1, 16, 12, 0), torch.zeros(2, 12, dtype=torch.int64)) == 1.0


@pytest.mark.parametrize("model", ["text", "images"])
def test_a_cell_of_each_model_has_all_quantities(model: str) -> None:
    found = measure(0, model, "Sanger", {"threshold": 0.1}, steps=3, depth=1, width=32, batch=2, length=16)
    assert 0 < found["density"] < 100 and found["loss"] > 0 and found["seconds"] > 0
