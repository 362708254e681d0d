"""Study of pruning methods: masked matrices, expectations, and a small cell that learns."""

import pytest

from thrifty.experiments import studies
from thrifty.experiments.studies.pruning_digits import DENSE, METHODS, label_of, masking, measure
from thrifty.experiments.study import Cells
from thrifty.experiments.tasks.digits_task import perceptron

PUBLISHED = {
    "static, uniform": (97.0, 23.3, 8.3), "static, ERK": (98.0, 85.1, 8.3), "magnitude, global": (97.7, 16.6, 8.3),
    "SNIP": (98.0, 96.5, 74.8), "GraSP": (94.5, 96.8, 66.4), "SET": (98.0, 91.6, 8.1), "RigL": (97.8, 96.7, 24.4),
}  # fmt: skip
"""Accuracy in percent at 10, 2 and 0.5 %, from another implementation."""


def cells(**changed: tuple[float, float, float]) -> Cells:
    found = {DENSE: {"accuracy": 98.4}}
    for method, right in ({**PUBLISHED} | changed).items():
        for density, accuracy in zip((0.1, 0.02, 0.005), right, strict=True):
            found[label_of(method, density)] = {"accuracy": accuracy}
    return found


def test_expectations_hold_for_known_values_only() -> None:
    study = studies.make("pruning_digits")
    assert set(cells()) == set(study.cases)
    assert all(holds(cells()) for holds in study.expect.values())
    alike = cells(**{method: (90.0, 90.0, 90.0) for method in METHODS})
    assert not any(holds(alike) for holds in study.expect.values())


def test_every_matrix_and_the_head_are_masked() -> None:
    shapes = {name: tuple(p.shape) for name, p in perceptron(8, 0).named_parameters() if p.ndim == 2}
    assert len(shapes) == 4
    for method in METHODS:
        (sparse,) = masking(method, 0.5, 50, 0)
        assert sparse.masked(shapes) == list(shapes)  # type: ignore[attr-defined]
    assert masking(DENSE, 1.0, 50, 0) == []


@pytest.mark.parametrize("method", [DENSE, "SNIP", "RigL"])
def test_a_small_cell_learns_at_its_density(method: str) -> None:
    density = 1.0 if method == DENSE else 0.5
    found = measure(0, method, density, width=32, steps=120, batch=32, every=20)
    assert found["accuracy"] > 75
    assert (found["least_density"] == 1.0) if method == DENSE else (0 < found["least_density"] <= density)
