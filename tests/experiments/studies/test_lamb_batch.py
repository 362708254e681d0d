"""Study of LAMB: the best rate at each batch, and the better optimizer."""

import pytest

from thrifty.experiments import studies
from thrifty.experiments.studies import lamb_batch
from thrifty.experiments.studies.lamb_batch import RATES
from thrifty.experiments.study import Cells
from thrifty.experiments.study_summary import cells_of

PUBLISHED = {"adamw": {16: 1.983, 64: 2.239, 256: 2.526}, "lamb": {16: 2.154, 64: 2.257, 256: 2.482}}


def seed_of_runs(lowest: dict[str, dict[int, float]]) -> Cells:
    """Return cells in which the second rate of each grid is the best."""
    study = studies.make("lamb_batch")
    measured = {
        (label, 0): {
            "loss": lowest[case["optimizer"]][case["batch"]]
            + 0.1 * abs(RATES[case["optimizer"]].index(case["rate"]) - 1)
        }
        for label, case in study.cases.items()
    }
    return cells_of(study, measured)[0]


def test_the_best_rates_and_the_gain_are_derived() -> None:
    cells = seed_of_runs(PUBLISHED)
    for batch in (16, 64, 256):
        for optimizer, rates in RATES.items():
            row = cells[f"best of {optimizer}, batch {batch}"]
            assert row == {"best_rate": rates[1], "inside": 1, "loss": PUBLISHED[optimizer][batch]}
        gain = cells[f"LAMB against AdamW, batch {batch}"]["lamb_gain"]
        assert gain == pytest.approx(PUBLISHED["adamw"][batch] - PUBLISHED["lamb"][batch])


def test_expectations_hold_for_the_published_shape_only() -> None:
    expected = studies.make("lamb_batch").expect
    assert all(holds(seed_of_runs(PUBLISHED)) for holds in expected.values())
    turned = {"adamw": PUBLISHED["lamb"], "lamb": PUBLISHED["adamw"]}
    assert [holds(seed_of_runs(turned)) for holds in expected.values()] == [True, False, False, False]


@pytest.mark.parametrize("optimizer", sorted(RATES))
def test_every_batch_sees_the_same_number_of_sequences(optimizer: lamb_batch.Optimizer) -> None:
    tiny = {"depth": 1, "width": 16, "length": 16, "sequences": 48, "rate": 1e-2}
    steps = [lamb_batch.measure(0, optimizer, batch, **tiny)["steps"] for batch in (4, 16, 48)]
    assert steps == [12, 3, 1]
