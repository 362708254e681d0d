"""A report shows what the model of a run has learned."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_recipes

import thrifty
from thrifty.core.recipe import Budget, ObjectiveSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipe = tiny_recipes.text(tmp_path, budget=Budget(steps=2))
    return thrifty.train(recipe=recipe, runs=tmp_path / "runs", quiet=True).folder


def test_report_shows_sample_and_loss_before_all_else(folder: Path) -> None:
    report = thrifty.report(folder)
    text, page = report.record.sample["text"], report.page.read_text()
    assert text.strip() and report.record.sample["step"] == 2
    loss, sample, tiles, curves = (
        page.index(words) for words in ('id="chart-loss"', 'class="sample"', 'class="tiles"', 'id="curves"')
    )
    assert loss < sample < tiles < curves


def test_sample_is_generated_once_per_step(folder: Path) -> None:
    thrifty.report(folder)
    written = (folder / "sample.json").stat().st_mtime_ns
    thrifty.report(folder)
    assert (folder / "sample.json").stat().st_mtime_ns == written


def test_missing_sample_has_a_reason(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    report = thrifty.report(folder)
    assert "text" not in report.record.sample and "No sample: " in report.page.read_text()


def test_other_models_have_no_sample(tmp_path: Path) -> None:
    recipe = replace(tiny_recipes.digits(), budget=Budget(steps=2), objective=ObjectiveSettings("classification"))
    report = thrifty.report(thrifty.train(recipe=recipe, runs=tmp_path / "runs", quiet=True))
    assert not report.record.sample and not (report.page.parent / "sample.json").exists()
