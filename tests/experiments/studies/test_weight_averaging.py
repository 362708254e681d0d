"""Study of weight averaging: running means of the weights, and a run independent of the evaluation step."""

import pytest
import torch

from thrifty.experiments import studies
from thrifty.experiments.studies import weight_averaging
from thrifty.experiments.studies.weight_averaging import measure, schedule_of
from thrifty.experiments.tasks.language_task import llama, train_on_bytes
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW

TINY = {"lr": 3e-3, "depth": 1, "width": 16, "length": 16, "batch": 2, "every": 1, "copies": 2, "decay": 0.5}


def test_means_of_one_copy_are_the_weights_themselves() -> None:
    one = measure(0, "constant", at=5, steps=10, **TINY | {"copies": 1, "decay": 0.0})
    assert one["lawa_gain"] == one["ema_gain"] == 0
    several = measure(0, "constant", at=5, steps=10, **TINY)
    assert several["loss"] == one["loss"]
    assert several["lawa_gain"] != 0 and several["ema_gain"] != 0


def test_the_mean_is_over_the_weights_of_the_run() -> None:
    length, batch, seed = TINY["length"], TINY["batch"], 3
    ends = [
        train_on_bytes(
            lambda: llama(1, 16, length, seed),
            [AdamW(lr=TINY["lr"]), GradientClipping(), schedule_of("cosine", 100 // 50, 100)],
            steps=at, seed=seed, length=length, batch=batch,
        )
        for at in (3, 4)
    ]  # fmt: skip
    with torch.no_grad():
        for mean, other in zip(ends[0].model.parameters(), ends[1].model.parameters(), strict=True):
            mean.add_(other).div_(2)
    found = measure(seed, "cosine", at=4, steps=100, **TINY)
    assert found["loss"] == pytest.approx(ends[1].held_out_loss(1024), rel=1e-9)
    assert found["lawa_loss"] == pytest.approx(ends[0].held_out_loss(1024), rel=1e-6)


def test_before_the_first_copy_the_raw_weights_count() -> None:
    found = measure(0, "cosine", at=3, steps=10, **TINY | {"every": 5})
    assert found["lawa_gain"] == 0


@pytest.mark.parametrize(
    ("name", "middle", "end"), [("constant", 1.0, 1.0), ("cosine", 0.5, pytest.approx(0, abs=1e-2))]
)
def test_rates_follow_the_planned_run(name: weight_averaging.Schedule, middle: float, end: object) -> None:
    transform = schedule_of(name, warmup=2, steps=102).update(weight_averaging.GradientTransform())
    rates = [transform.rate(transform.scalars(step, step)) for step in range(102)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[52] == pytest.approx(middle, abs=0.02)
    assert rates[101] == end


def test_expectations_hold_for_the_published_shape() -> None:
    study = studies.make("weight_averaging")
    moments = sorted({case["at"] for case in study.cases.values()})
    published = {"constant": (2.157, 1.9, 1.615, 1.551, 1.517), "cosine": (2.160, 1.9, 1.563, 1.474, 1.4535)}
    lawa = {"constant": (2.175, 1.85, 1.534, 1.468, 1.440), "cosine": (2.178, 1.85, 1.531, 1.462, 1.4538)}
    cells = {
        f"schedule {name}, at {at}": {
            "loss": published[name][place],
            "lawa_loss": lawa[name][place],
            "lawa_gain": published[name][place] - lawa[name][place],
            "ema_gain": published[name][place] - lawa[name][place],
        }
        for name in published
        for place, at in enumerate(moments)
    }
    assert cells.keys() == study.cases.keys()
    assert all(holds(cells) for holds in study.expect.values())
    end = f"schedule cosine, at {moments[-1]}"
    assert not all(holds(cells | {end: cells[end] | {"lawa_gain": 0.05}}) for holds in study.expect.values())
