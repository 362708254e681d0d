"""Study of dropped patches: expectations, equal FLOPs of all variants, and a small cell."""

import pytest
from pair_runs import write_crosses

from thrifty.experiments import studies
from thrifty.experiments.studies.flip import HALF_TUNED, TUNED, VARIANTS, WHOLE, label_of, measure, steps_for
from thrifty.experiments.study import Cells


def cells(*recalls: float, work: tuple[int, ...] = (100, 300)) -> Cells:
    """Return cells with the same recalls at each budget, in the order of the variants."""
    return {
        label_of(way, steps): {"recall_10": recall, "chance_10": 0.5}
        for steps in work
        for way, recall in zip(VARIANTS, recalls, strict=True)
    }


def test_expectations_hold_for_the_published_shape_only() -> None:
    study = studies.make("flip")
    published = cells(20.0, 21.0, 24.0, 15.0, 22.0)
    assert set(published) == set(study.cases)
    assert all(holds(published) for holds in study.expect.values())
    alike = cells(2.0, 2.0, 2.0, 2.0, 2.0)
    assert not any(holds(alike) for holds in study.expect.values())


@pytest.fixture(scope="module")
def crosses(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_crosses(tmp_path_factory.mktemp("crosses")))


SMALL = {"depth": 2, "width": 32, "side": 16, "patch": 4, "batch": 16, "lr": 5e-3}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path_factory.getbasetemp() / "flip-cache"))


@pytest.mark.parametrize("way", VARIANTS)
def test_all_variants_of_a_budget_cost_the_same(way: str) -> None:
    rate, tuned = VARIANTS[way]
    whole, dropped = 7.0, 7.0 * (1 - 0.8 * rate)
    steps = steps_for(1000, whole, dropped, tuned)
    masked = round(steps * (1 - TUNED * tuned)) if rate else 0
    assert masked * dropped + (steps - masked) * whole == pytest.approx(1000 * whole, rel=0.002)


@pytest.mark.slow
def test_a_small_cell_has_recall_and_cost(crosses: str) -> None:
    found = measure(0, HALF_TUNED, 3, **SMALL, data=crosses)  # type: ignore[arg-type]
    whole = measure(0, WHOLE, 1, **SMALL, data=crosses)  # type: ignore[arg-type]
    assert found["steps"] > 3 and whole["steps"] == 1
    assert found["step_flops"] < whole["step_flops"]
    assert 0 <= found["recall_1"] <= found["recall_10"] <= 100 and 0 < found["chance_10"] <= 100
