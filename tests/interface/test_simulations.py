"""Simulations from Python: results with charts, tables and plain data."""

from pathlib import Path

import pytest

import thrifty
from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace
from thrifty.simulators.accelerator.trace_file import save_trace


def test_a_simulated_step_has_a_report_and_a_chart(tmp_path: Path) -> None:
    step = thrifty.simulate.cluster("gpt1-nano", mesh={"pipeline": 4, "tensor": 2}, batch=8)
    assert 0 < step.report.mfu < 1 and "8 ranks of h100-box" in str(step)
    assert step.figure().save(tmp_path / "step.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "memory of pipeline rank" in step._repr_html_()


def test_designs_are_rows_of_a_table(tmp_path: Path) -> None:
    save_trace(synthetic_trace("runs", 0.25, heads=2, tokens=32), tmp_path / "t.safetensors")
    compared = thrifty.simulate.attention(tmp_path / "t.safetensors", ["elsa", "a3:copies=2"], measure=False)
    assert list(compared.table()["machine"]) == ["elsa", "a3:copies=2"] and "a3:copies=2" in str(compared)
    with pytest.raises(UsageError, match="did you mean 'clock'"):
        thrifty.simulate.attention(tmp_path / "t.safetensors", ["elsa"], equal_resources={"clocks": 1e9})


def test_the_cluster_may_be_a_file_and_missing_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('device = "h100"\n')
    with pytest.raises(UsageError, match="has no 'per_node'"):
        thrifty.simulate.cluster("gpt3-175b", cluster=str(tmp_path / "mine.toml"))


def test_a_choice_by_scores_is_a_technique_that_a_recipe_takes(tmp_path: Path) -> None:
    scored = thrifty.datasets.score("vit-digits", method="random", out=tmp_path / "s.safetensors", quiet=True)
    chosen = thrifty.datasets.prune(scored.file, keep_fraction=0.25)
    assert chosen.kept == round(0.25 * len(scored.scores)) and chosen.technique.keep == 0.25
    assert chosen.technique in thrifty.recipe(recipe="vit-digits", techniques=[chosen.technique]).techniques
