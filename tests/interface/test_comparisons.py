"""`thrifty.compare` on the user's own model, data and loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import user_work

import thrifty
from thrifty.core.errors import UsageError

QUICK: Any = {"seeds": 1, "rate_trials": 1, "equal_budget": "steps", "warmup_steps": 2, "quiet": True}


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> thrifty.ComparisonResult:
    """In this process, since no other one can be given a lambda."""
    own = user_work.objects() | {"loss": lambda model, batch: user_work.loss(model, batch)}
    baseline = thrifty.recipe(**own, techniques=["adamw", "cosine"], batch=16, budget="4 steps")
    changes = {"lion": ["-adamw", thrifty.Lion(lr=2e-4)], "small": ["data.batch=8"]}
    return thrifty.compare(baseline, changes, runs=tmp_path_factory.mktemp("runs"), name="race", **QUICK)


def test_variants_of_the_users_own_objects_are_judged(verdict: thrifty.ComparisonResult) -> None:
    assert verdict.verdicts.keys() == {"lion", "small"} and verdict.exit_code == 0
    names = [row["variant"] for row in verdict.table().as_dict()]
    assert names == ["baseline", "lion", "small"]
    assert verdict.folder.name == "race" and "lion: undecided" in str(verdict)
    assert all(entry["status"] == "finished" for entry in verdict.as_dict()["runs"])
    assert "all runs used one process" in str(verdict)


@pytest.mark.parametrize("ending", [".pdf", ".png", ".svg"])
def test_the_figure_is_saved_in_the_formats_of_papers(
    verdict: thrifty.ComparisonResult, tmp_path: Path, ending: str
) -> None:
    content = verdict.figure().save(tmp_path / f"race{ending}").read_bytes()
    assert content.startswith({".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<svg"}[ending])
    assert b"var(--" not in content
    with pytest.raises(UsageError, match="does not end in"):
        verdict.figure().save(tmp_path / "race.doc")


@pytest.mark.slow
def test_importable_functions_are_compared_in_other_processes(tmp_path: Path) -> None:
    changes = {"clipped": ["gradients.clip:max_norm=0.1"]}
    result = thrifty.compare(**user_work.objects(), batch=16, budget=12, variants=changes, runs=tmp_path, **QUICK)
    assert "one process" not in str(result) and result.verdicts == {"clipped": "undecided"}
    assert not list(result.folder.glob("*objects*"))


def test_losses_of_different_meaning_are_not_compared(tmp_path: Path) -> None:
    baseline = thrifty.recipe(**user_work.objects(), batch=16, budget=3)
    other = thrifty.recipe(**user_work.objects() | {"loss": user_work.accuracy}, batch=16, budget=3)
    with pytest.raises(UsageError, match="is not comparable"):
        thrifty.compare(baseline, {"other": other}, runs=tmp_path, **QUICK)


def test_a_verdict_on_other_data_or_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = user_work.objects() | {"loss": lambda model, batch: user_work.loss(model, batch), "model": user_work.build()}

    def race(quiet: bool = True, **changed: Any) -> thrifty.ComparisonResult:
        baseline = thrifty.recipe(**own | changed, techniques=["adamw", "cosine"], batch=16, budget="4 steps")
        options = QUICK | {"quiet": quiet}
        return thrifty.compare(baseline, {"lion": "lion:lr=2e-4"}, runs=tmp_path, name="race", **options)

    first = race()
    with pytest.raises(UsageError, match="started with other data or weights: data differ"):
        race(data=user_work.NoisySums(200, 5000))
    torch.nn.init.zeros_(own["model"][0].weight)
    assert race(quiet=False).as_dict()["status"] == "finished"  # no run is left
    assert "other data or weights: weights of baseline and weights of lion differ" in capsys.readouterr().err
    assert thrifty.report(first).as_dict()["status"] == "finished"
    record = Path(first.folder, "comparison.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"runs": [], "status": "interrupted"}))
    with pytest.raises(UsageError, match="other data or weights: weights of baseline and weights of lion differ"):
        race()
