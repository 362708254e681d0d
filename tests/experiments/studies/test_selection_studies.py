"""Studies of data selection: expectations that can hold and fail, and correct components."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from thrifty.experiments import studies
from thrifty.experiments.studies import data_diet, hard_or_easy, importance_sampling, teacher_perceptron
from thrifty.experiments.study import Cells
from thrifty.experiments.tasks.data_selection_task import FinishedRun, at_equal_compute, gains, task_of
from thrifty.experiments.tasks.digits_task import with_wrong_labels

ERRORS = {
    "all": (0.195, 0.118, 0.061, 0.034, 0.018), "random": (0.342, 0.263, 0.181, 0.115, 0.058),
    "easiest": (0.193, 0.145, 0.090, 0.052, 0.027), "hardest": (0.453, 0.404, 0.104, 0.035, 0.018),
    teacher_perceptron.BLURRED: (0.43, 0.39, 0.31, 0.10, 0.03),
}  # fmt: skip
"""Errors of the teacher-student perceptron. The first four rows are from another implementation."""


def verdicts(name: str, cells: Cells) -> list[bool]:
    study = studies.make(name)
    assert set(cells) == set(study.cases)
    return [holds(cells) for holds in study.expect.values()]


def perceptron_cells(errors: dict[str, tuple[float, ...]]) -> Cells:
    return {
        teacher_perceptron.label_of(kept, many): {"error": error}
        for kept, of_each in errors.items()
        for many, error in zip((2, 4, 8, 16, 32), of_each, strict=True)
    }


def test_the_perceptron_expectations_hold_for_known_values_only() -> None:
    assert all(verdicts("teacher_perceptron", perceptron_cells(ERRORS)))
    turned = {kept: (0.3,) * 5 for kept in ERRORS} | {"all": (0.1,) * 5}
    assert not any(verdicts("teacher_perceptron", perceptron_cells(turned)))


def test_the_maximum_margin_matches_a_general_solver() -> None:
    random = np.random.default_rng(0)
    examples = random.standard_normal((40, 4))
    signed = examples * np.sign(examples @ random.standard_normal(4))[:, None]
    found = teacher_perceptron.max_margin(signed)
    within = {"type": "ineq", "fun": lambda w: signed @ w - 1, "jac": lambda w: signed}
    start = 50 * signed.mean(0)
    wanted = minimize(lambda w: w @ w / 2, start, jac=lambda w: w, constraints=within, options={"maxiter": 500})
    assert wanted.success and (signed @ found).min() >= 1 - 1e-9
    np.testing.assert_allclose(found, wanted.x, rtol=1e-4)


def test_a_probe_has_the_requested_angle() -> None:
    random = np.random.default_rng(0)
    teacher = random.standard_normal(7)
    teacher /= np.linalg.norm(teacher)
    probe = teacher_perceptron.probe_at(teacher, 20, random)
    assert np.linalg.norm(probe) == pytest.approx(1)
    assert math.degrees(math.acos(probe @ teacher)) == pytest.approx(20)


RIGHT = {
    "all": 96.0, "random": 94.0, "EL2N, hardest": 88.0, "EL2N, easiest": 89.0, "EL2N, hardest but some": 98.5,
    "GraNd at initialization, hardest": 90.0,
}  # fmt: skip


def diet_cells(right: dict[str, float], agreement: dict[str, float]) -> Cells:
    others = dict.fromkeys(data_diet.VARIANTS, 93.0)
    return {way: {"accuracy": value} for way, value in (others | right).items()} | {data_diet.SCORES: agreement}


def test_data_diet_expectations_can_hold_and_can_fail() -> None:
    agreement = {"first_grand_to_input_norm": 0.8, "one_to_mean": 0.7, "mean_to_mean": 0.8, "caught": 90.0}
    assert all(verdicts("data_diet", diet_cells(RIGHT, agreement)))
    other = {"first_grand_to_input_norm": 0.1, "one_to_mean": 0.8, "mean_to_mean": 0.7, "caught": 10.0}
    turned = dict.fromkeys(RIGHT, 94.0) | {"GraNd at initialization, hardest": 97.0}
    assert not any(verdicts("data_diet", diet_cells(turned, other)))


def test_exactly_the_marked_labels_are_wrong() -> None:
    noisy, wrong = with_wrong_labels(0.05, seed=3)
    right, none = with_wrong_labels(0.0, seed=3)
    assert int(wrong.sum()) == 65 and not none.any()
    assert torch.equal(noisy.labels != right.labels, wrong)
    assert torch.equal(noisy.images, right.images)


def test_hardest_but_some_starts_after_the_offset() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3, 0.2, 0.8, 0.4, 0.6, 0.0])
    assert data_diet.chosen(scores, "hardest", 0.3, 0.2).tolist() == [1, 6, 3]
    assert data_diet.chosen(scores, "easiest", 0.3, 0.2).tolist() == [9, 0, 5]
    assert data_diet.chosen(scores, "hardest but some", 0.3, 0.2).tolist() == [3, 8, 2]


def test_an_equal_fraction_of_each_class_is_kept() -> None:
    labels, keys = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([1.0, 2, 3, 4, 50, 60, 70, 80])
    assert hard_or_easy.kept_of_each_class(keys, labels, 0.5, 0.0).tolist() == [3, 2, 7, 6]
    assert hard_or_easy.kept_of_each_class(keys, labels, 0.5, 0.25).tolist() == [2, 1, 6, 5]


def halves(leads: dict[str, tuple[float, ...]]) -> dict[str, dict[str, float]]:
    """Return accuracies of the variants: 80 percent plus `leads` at each number of images."""
    sizes = {"digits": (100, 325, 1300), "fashion-mnist": (250, 2000, 30000)}
    return {
        hard_or_easy.label_of(way, data, images): {"accuracy": 80 + leads[way][place]}
        for data, of_each in sizes.items()
        for way in hard_or_easy.VARIANTS
        for place, images in enumerate(of_each)
    }


def test_hard_or_easy_expectations_can_hold_and_can_fail() -> None:
    seen = {
        "all": (10.0, 8.0, 9.5), "random": (5.0, 5.0, 9.0), "hardest": (4.0, 4.0, 5.0), "easiest": (6.0, 2.0, 1.0),
        "hardest but some": (0.0, 0.0, 6.0),
    }  # fmt: skip
    found = halves(seen)
    found[hard_or_easy.label_of("hardest", "digits", 1300)]["accuracy"] = 89.0
    assert all(verdicts("hard_or_easy", found))
    turned = seen | {"hardest": (5.0, 3.0, 2.0), "easiest": (2.0, 5.5, 9.0), "hardest but some": (0.0, 0.0, 1.0)}
    assert not any(verdicts("hard_or_easy", halves(turned)))


def sampling_cells(losses: tuple[float, ...], gain: float, opened: float, work: float) -> Cells:
    return {
        importance_sampling.label_of(way, data): {
            "loss": loss if data == "digits" else loss + (0.1 if way == "easiest half" else 0.0),
            "work": work,
            "true_gain": gain if data == "digits" else 1 / gain,
            "opened": opened if data == "digits" else 0.0,
        }
        for data in ("digits", "text")
        for way, loss in zip(importance_sampling.VARIANTS, losses, strict=True)
    }


def test_importance_sampling_expectations_can_hold_and_fail() -> None:
    assert all(verdicts("importance_sampling", sampling_cells((0.2, 0.25, 0.3, 0.3), 8.0, 0.3, 1.0)))
    assert not any(verdicts("importance_sampling", sampling_cells((0.4, 0.25, 0.3, 0.1), 0.5, 0.0, 1.5)))


@pytest.mark.parametrize("opens", [100, 320, 400])
def test_the_number_of_steps_meets_the_compute_budget(opens: int) -> None:
    """The gate opens at a certain step, independent of the length of the run."""
    ran: list[int] = []

    def run(steps: int) -> FinishedRun:
        ran.append(steps)
        return FinishedRun(torch.nn.Identity(), steps, steps + max(0, steps - opens))

    found = at_equal_compute(run, 600)
    assert abs(found.work - 600) <= 30 and len(ran) <= 6


def test_a_closed_gate_requires_no_search() -> None:
    assert at_equal_compute(lambda steps: FinishedRun(torch.nn.Identity(), steps, steps), 50).steps == 50


def test_the_gain_is_tau_squared_if_scores_are_gradient_norms() -> None:
    """The model is one bias on one-token text, so the gradient of its logits equals the gradient of its parameter."""
    task = task_of("text", 0, depth=1, width=16, batch=32, length=1, windows=400)

    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(0)))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.bias.expand(*tokens.shape, 256)

    found = gains(Bias(), task)
    assert found["claimed_gain"] > 1
    assert found["true_gain"] == pytest.approx(found["claimed_gain"], rel=1e-4)
