"""Study of N:M training: its expectations, and variants that match their names."""

from thrifty.experiments import studies
from thrifty.experiments.studies import n_of_m
from thrifty.experiments.studies.n_of_m import DECAYED, DENSE, ESTIMATED, FINISH, PLAIN, QUARTER, STRONG, TRANSPOSABLE
from thrifty.experiments.study import Cells
from thrifty.experiments.study_summary import cells_of

LOSSES = {
    DENSE: 2.1, PLAIN: 2.12, QUARTER: 2.2, DECAYED: 2.11, STRONG: 2.18, TRANSPOSABLE: 2.14, FINISH: 2.12,
    ESTIMATED: 2.2,
}  # fmt: skip


def cells(losses: dict[str, float], peak: float = 0.03, late: float = 0.003, calm: float = 0.5) -> Cells:
    study = studies.make("n_of_m")
    measured = {
        (label, 0): {
            "held_out_loss": loss,
            "peak_flips": peak * (calm if label == STRONG else 1),
            "late_flips": late * (calm if label == STRONG else 1),
        }
        for label, loss in losses.items()
    }
    return cells_of(study, measured)[0]


def test_each_expectation_can_hold_and_can_fail() -> None:
    expected = studies.make("n_of_m").expect
    assert all(holds(cells(LOSSES)) for holds in expected.values())
    turned = LOSSES | {PLAIN: 2.4, DECAYED: 2.5, STRONG: 2.5, FINISH: 2.2, ESTIMATED: 2.3}
    assert not any(holds(cells(turned, late=0.02, calm=2.0)) for holds in expected.values())


def test_masks_flip_only_in_masked_steps() -> None:
    tiny = {"depth": 1, "width": 16, "length": 16, "batch": 2, "steps": 6}
    dense, masked = (n_of_m.measure(0, masked=masked, **tiny) for masked in (False, True))
    assert dense["peak_flips"] == 0 < masked["late_flips"] <= masked["peak_flips"]
    assert dense["held_out_loss"] != masked["held_out_loss"]
    at_once = n_of_m.measure(0, dense_from=0.0, **tiny)
    assert at_once["held_out_loss"] == dense["held_out_loss"] and at_once["peak_flips"] == 0
