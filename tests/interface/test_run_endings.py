"""The printed end of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from thrifty.core.errors import TYPED
from thrifty.core.plain_values import read_extension
from thrifty.core.recipe import Budget, ObjectiveSettings, Recipe
from thrifty.interface.run_endings import ending, next_commands, reached


def summary(folder: Path, techniques: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "recipe.toml").write_text(f"[data]\nbatch = 8\n{techniques}")
    records = [{"kind": "step", "step": step, "notes": {"noise_scale": 50.0 * step}} for step in (1, 2)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = {"held_out_loss": 3.0, "unigram_entropy": 5.0, "bytes_per_token": 3.0}
    return {"folder": str(folder), "status": "finished", "steps": 2, "seconds": 1.0, **figures}


def test_a_measured_noise_scale_ends_with_batch_advice(tmp_path: Path) -> None:
    measured = '[[techniques]]\nname = "measure.noise_scale"\n'
    *_, advice, last = ending(summary(tmp_path / "measured", measured))
    assert advice == "gradient noise scale 100 examples (this batch: 8): much larger batches gain little"
    assert last.startswith("run folder")


def test_a_run_that_did_not_measure_says_nothing_of_it(tmp_path: Path) -> None:
    assert "noise" not in "".join(ending(summary(tmp_path / "plain", "")))


def test_runs_print_the_used_part_of_a_time_budget(tmp_path: Path) -> None:
    timed = summary(tmp_path / "timed", "") | {"seconds": 24.2, "budget_seconds": 60.0, "used_seconds": 58.2}
    assert ending(timed)[0] == "finished after 2 steps, 24 s of training, used 58 of 60 s"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"held_out_loss": 5.5}, "learned nothing from context yet: perplexity 245, token frequencies alone 148"),
        (
            {"held_out_loss": 4.99},
            "learned almost nothing from context yet: perplexity 147, token frequencies alone 148",
        ),
        ({"held_out_loss": 3.0}, "learned from context: perplexity 20.1, token frequencies alone 148"),
        ({"held_out_loss_at_start": 2.5}, "not better than before the first step"),
        ({"held_out_loss_at_start": 3.5}, "better than before the first step"),
        (
            {"unigram_entropy": None, "label_entropy": 2.3},
            "learned nothing from the examples yet: perplexity 20.1, label",
        ),
        (
            {"unigram_entropy": None, "label_entropy": 4.0},
            "learned from the examples: perplexity 20.1, label frequencies",
        ),
        (
            {"best_held_out_loss": 2.0},
            "the best held-out loss was 2.000, before the end",
        ),
    ],
)
def test_end_states_the_result_in_words(figures: dict[str, Any], words: str) -> None:
    known = {"held_out_loss": 3.0, "unigram_entropy": 5.0}
    assert any(line.startswith(words) for line in reached(known | figures))


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "thrifty sample 'my runs/text' --tokens 200"),
        ({"objective": ObjectiveSettings("chat_answers")}, "thrifty chat 'my runs/text'"),
        ({"objective": ObjectiveSettings("classification")}, "thrifty report 'my runs/text' --open"),
    ],
)
def test_end_has_three_commands(changes: dict[str, Any], first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED, "1")
    commands = next_commands({"folder": "my runs/text"}, Recipe(**changes))
    assert len(commands) == 3 and commands[0] == first
    assert "thrifty resume 'my runs/text' --budget +500steps" in commands


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        (Budget(seconds=9.363), "+9s"),
        (Budget(tokens=1.5e12), "+1500000000000tokens"),
        (Budget(epochs=0.5), "+0.5epochs"),
    ],
)
def test_next_command_doubles_the_budget(budget: Budget, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED, "1")
    assert next_commands({"folder": "a"}, Recipe(budget=budget))[2] == f"thrifty resume a --budget {more}"
    assert read_extension(more)


def test_end_has_calls_for_python() -> None:
    commands = next_commands({"folder": "runs/text"}, Recipe(budget=Budget(seconds=90.0)))
    assert commands[0] == "thrifty.sample('runs/text', tokens=200)"
    assert commands[2] == "thrifty.resume('runs/text', budget=\"+90s\")"
