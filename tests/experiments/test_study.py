"""Valid and invalid definitions of a study."""

import pytest
import tiny_studies
from tiny_studies import levels, measure

from thrifty.core.errors import UsageError
from thrifty.experiments.study import MeasuredQuantity, Study, grid


def study(**changed: object) -> Study:
    parts = {
        "measure": measure,
        "cases": {"one": {"level": 1.0}},
        "quantities": {"height": MeasuredQuantity("how high")},
    }
    return Study(name="mine", about="Mine.", **(parts | changed))  # type: ignore[arg-type]


def test_a_grid_has_every_labelled_combination() -> None:
    cases = grid(p=(2, 4), rate=(1e-3, 0.5), kind=("a",))
    assert len(cases) == 4
    assert cases["p 4, rate 0.001, kind a"] == {"p": 4, "rate": 1e-3, "kind": "a"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cases": {"one": {"level": 1.0, "depth": 2}}}, "case 'one'.*'depth'"),
        ({"cases": {"one": {}}}, "case 'one'.*'level'"),
        ({"cases": {"one": {"level": (1, 2)}}}, "not plain JSON"),
        ({"cases": {}}, "0 cases"),
        ({"seeds": 0}, "0 seeds"),
        ({"measure": lambda seed, level: {}}, "another process cannot import"),
    ],
)
def test_inconsistent_definitions_are_refused(changed: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        study(**changed)


def test_the_measure_is_importable_by_name() -> None:
    assert levels().measured_by == f"{tiny_studies.__name__}:measure"


def test_the_definition_depends_on_settings_but_not_on_seeds() -> None:
    assert levels(seeds=2).definition() == levels(seeds=5).definition()
    assert levels().definition() != levels(spread=0.2).definition()
