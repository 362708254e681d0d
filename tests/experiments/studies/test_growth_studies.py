"""Studies of growth: counted compute, and expectations of the published shapes."""

import pytest

from thrifty.experiments import studies
from thrifty.experiments.studies import layer_drop, stacking
from thrifty.techniques.growth.layer_drop import keep_probability, theta_at


def test_the_mean_depth_of_a_run_that_doubles_twice() -> None:
    assert stacking.mean_depth(8) == pytest.approx(0.125 * 2 + 0.175 * 4 + 0.7 * 8)
    assert stacking.mean_depth(8, at=()) == 8
    assert stacking.mean_depth(1) == 1


@pytest.mark.parametrize("full_steps", [50, 800])
def test_dropped_blocks_pay_for_exactly_the_additional_steps(full_steps: int) -> None:
    steps = layer_drop.steps_for(full_steps * 8, 8)

    def spent(steps: int) -> float:
        return sum(
            keep_probability(block, 8, theta_at(step, 0.5, round(0.01 * steps)))
            for step in range(steps)
            for block in range(8)
        )

    assert spent(steps) <= full_steps * 8 < spent(steps + 1)
    assert steps == pytest.approx(full_steps * 8 / (23 / 4), rel=0.03)  # except for the first steps


def test_stacking_expects_a_shrinking_gain() -> None:
    study = studies.make("stacking")
    found = {("full", 800): 1.628, ("full", 4000): 1.208, ("stacked", 800): 1.575, ("stacked", 4000): 1.191}
    cells = {
        f"way {way}, full_steps {steps}": {"loss": found.get((way, steps), found["stacked", steps])}
        for way in stacking.VARIANTS
        for steps in (800, 4000)
    }
    assert cells.keys() == study.cases.keys()
    assert all(holds(cells) for holds in study.expect.values())
    assert study.derive is not None
    gains = {label: numbers["gain"] for label, numbers in study.derive(cells).items()}
    assert gains["gain of stacked, full_steps 800"] == pytest.approx(0.053)
    assert gains["gain of stacked, full_steps 4000"] == pytest.approx(0.017) and len(gains) == 6
    lasting = cells | {"way stacked, full_steps 4000": {"loss": 1.208 - 0.05}}
    assert not all(holds(lasting) for holds in study.expect.values())


def test_layer_dropping_expects_no_gain() -> None:
    study = studies.make("layer_drop")
    found = {
        "dropping False, rate constant, full_steps 800": 1.597, "dropping True, rate constant, full_steps 800": 1.654,
        "dropping False, rate cosine, full_steps 800": 1.628, "dropping True, rate cosine, full_steps 800": 1.730,
        "dropping False, rate constant, full_steps 4000": 1.303, "dropping True, rate constant, full_steps 4000": 1.339,
        "dropping False, rate cosine, full_steps 4000": 1.208, "dropping True, rate cosine, full_steps 4000": 1.261,
    }  # fmt: skip
    cells = {label: {"loss": loss} for label, loss in found.items()}
    assert cells.keys() == study.cases.keys()
    assert all(holds(cells) for holds in study.expect.values())
    gaining = cells | {"dropping True, rate cosine, full_steps 800": {"loss": 1.6}}
    assert not all(holds(gaining) for holds in study.expect.values())


def test_accuracy_against_seconds_is_compared_at_the_last_budget() -> None:
    study = studies.make("resolution")
    cells = {
        label: {
            "seconds": case["steps"] * (0.6 if case["way"] != "full" else 1.0),
            "accuracy": 0.5 + case["steps"] / 10000 - (0.02 if case["way"] != "full" else 0.0),
        }
        for label, case in study.cases.items()
    }
    assert all(holds(cells) for holds in study.expect.values())
    worse = cells | {"way resolution, steps 800": {"seconds": 760.0, "accuracy": 0.53}}
    assert [holds(worse) for holds in study.expect.values()] == [False, False, True, True]
