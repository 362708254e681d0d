"""Study of batch scaling: composed schedules, and accuracy."""

import pytest
import torch

from thrifty.composition.compose import BaseRun, compose
from thrifty.data.images.digits import DigitEpochs, DigitImages
from thrifty.experiments import studies
from thrifty.experiments.studies import batch_scaling
from thrifty.experiments.studies.batch_scaling import LARS, METHODS, accuracy, measure, perceptron
from thrifty.objectives.classification import Classification

CASE = {"rate": 0.02, "coefficient": 0.01, "base_batch": 16, "hidden": [32]}
PUBLISHED = {
    "same rate": (98.0, 95.6, 63.1, 35.3),
    "linear": (98.0, 97.8, 95.4, 20.6),
    "linear, warm-up": (97.9, 97.9, 94.8, 24.0),
    "square root, warm-up": (97.9, 96.7, 92.1, 91.0),
    LARS: (95.0, 98.2, 96.8, 92.9),
}


@pytest.mark.parametrize(
    ("method", "first", "last"),
    [("same rate", 1, 1), ("linear", 4, 4), ("linear, warm-up", 1, 4), ("square root, warm-up", 1, 2), (LARS, 1, 4)],
)
def test_the_rate_starts_and_ends_as_in_the_method(method: str, first: float, last: float) -> None:
    batch = 4 * 16
    found = batch_scaling.chosen(METHODS[method], 0.02, 0.01, base_batch=16, batch=batch)
    plain = BaseRun(lambda: perceptron([8], 0), DigitEpochs("train", batch), Classification())
    transform = compose(plain, found, 305).transform()
    epoch = 1300 // batch
    rates = [transform.rate(transform.scalars(step, step)) / 0.02 for step in (0, 5 * epoch + 2)]
    assert rates == pytest.approx([first, last])


def test_initialization_depends_on_the_seed_only() -> None:
    before = torch.random.get_rng_state()
    one, again, other = (perceptron([8], seed)[1].weight for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_accuracy_is_the_fraction_of_correct_test_images() -> None:
    test = DigitImages("test")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.nn.functional.one_hot(torch.tensor(3), 10))
    assert accuracy(model) == pytest.approx(float((test.labels == 3).float().mean()))


@pytest.mark.slow
def test_all_methods_learn_at_small_batches() -> None:
    for method in METHODS:
        assert measure(0, batch=32, method=method, epochs=4, **CASE)["accuracy"] > 0.5, method
    large = {method: measure(0, batch=650, method=method, epochs=15, **CASE) for method in ("linear", LARS)}
    assert large["linear"]["steps"] == 30
    assert large[LARS]["accuracy"] > 0.85


def test_a_diverged_run_has_the_accuracy_of_its_last_model() -> None:
    found = measure(0, batch=32, method="same rate", epochs=1, **CASE | {"rate": 1e30})
    assert 0 <= found["accuracy"] < 0.5


def test_the_published_shape_is_the_one_expected() -> None:
    study = studies.make("batch_scaling")
    batches = sorted({case["batch"] for case in study.cases.values()})
    cells = {
        f"{method}, batch {batch}": {"accuracy": PUBLISHED[method][place] / 100}
        for method in METHODS
        for place, batch in enumerate(batches)
    }
    assert cells.keys() == study.cases.keys()
    assert all(holds(cells) for holds in study.expect.values())
    same = {label: {"accuracy": 0.97} for label in cells}
    held = [holds(same) for holds in study.expect.values()]
    assert held == [False, True, False, True, True, False]
