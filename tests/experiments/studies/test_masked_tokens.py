"""Study of omitted mask tokens: equal FLOPs, equal evaluation, and expectations that can fail."""

from pathlib import Path

import pytest
import torch

from thrifty.experiments import studies
from thrifty.experiments.studies.masked_tokens import (
    BERT,
    CROSS,
    MORE,
    RATES,
    SELF,
    UNTRAINED,
    encoder,
    flops,
    label_of,
    measure,
)
from thrifty.experiments.study import Cells
from thrifty.experiments.tasks.token_type_probe import KINDS, PLACES, places, probe_accuracy, token_types

SIZES = {"lr": 2e-3, "depth": 2, "width": 32, "length": 32, "batch": 4, "seed": 0}


CLAIMED = {
    600: {BERT: (38.0, 3.2), MORE: (40.0, 3.1), SELF: (53.0, 2.8), CROSS: (52.0, 2.8)},
    2500: {BERT: (62.0, 1.9), MORE: (60.0, 2.0), SELF: (61.5, 1.94), CROSS: (61.0, 1.95)},
}


def cells(**changed: tuple[float, float]) -> Cells:
    """Return the cells that the paper suggests; `changed` sets the values of variants at both budgets."""
    found = {
        label_of(way, paid): changed.get(way, each) for paid, ways in CLAIMED.items() for way, each in ways.items()
    }
    return {
        case: {"probe_accuracy": told, "tuned_loss": loss}
        for case, (told, loss) in ({UNTRAINED: (43.0, 3.2)} | found).items()
    }


def test_expectations_hold_for_the_papers_values_only() -> None:
    study = studies.make("masked_tokens")
    assert set(cells()) == set(study.cases)
    assert all(holds(cells()) for holds in study.expect.values())
    useless = cells(**dict.fromkeys(RATES, (43.0, 3.3)))
    worse = cells(**dict.fromkeys((SELF, CROSS), (47.0, 2.7)))
    assert [holds(useless) for holds in study.expect.values()] == [False, False, True, True, False]
    assert [holds(worse) for holds in study.expect.values()] == [True, True, False, False, False]


@pytest.mark.slow
def test_all_variants_have_equal_flops() -> None:
    per_step = {way: flops(way, **SIZES) for way in RATES}
    assert per_step[CROSS] < per_step[SELF]
    found = {way: measure(0, way, 6, 2, 2, 32, 32, 4, 2e-3) for way in (BERT, CROSS)}
    assert found[BERT]["own_steps"] == 6
    assert found[CROSS]["own_steps"] == round(6 * per_step[BERT] / per_step[CROSS])
    assert found[CROSS]["probe_accuracy"] > 100 / len(KINDS)


def test_byte_kinds_match_the_python_tokenizer(tmp_path: Path) -> None:
    source = "def f(x):  # why\n    return 'a\\n' + x\n"
    (tmp_path / "source.py").write_text(source)
    text, kind = token_types(tmp_path / "source.py")
    assert bytes(text).decode() == source
    found = {
        name: "".join(source[place] for place in (kind == number).nonzero()[0]) for number, name in enumerate(KINDS)
    }
    assert found == {"COMMENT": "# why", "STRING": "'a\\n'", "KEYWORD": "defreturn", "NAME": "fxx"}
    (tmp_path / "broken.py").write_text("x = (")
    assert len(token_types(tmp_path / "broken.py")[0]) == 0


def test_the_probe_has_other_test_files_and_balanced_kinds() -> None:
    (train_bytes, train_kinds), (test_bytes, test_kinds) = places(32, 0)
    assert [labels.bincount().tolist() for labels in (train_kinds, test_kinds)] == [
        [each] * len(KINDS) for each in PLACES
    ]
    middle = torch.cat((train_bytes, test_bytes))[:, 16]
    assert middle.min() >= ord("a") and middle.max() <= ord("z")
    seen = {tuple(row) for row in train_bytes.tolist()}
    assert sum(tuple(row) in seen for row in test_bytes.tolist()) < len(test_bytes) / 50


def test_a_probe_of_constant_states_has_chance_accuracy() -> None:
    model = encoder(1, 16, 32, 0)
    with torch.no_grad():
        model.embedding.token.weight.fill_(0.1)
    assert probe_accuracy(model, 32, 0) == pytest.approx(100 / len(KINDS))
