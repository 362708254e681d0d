"""`thrifty data prune`: counts of a choice by scores, and the settings that a recipe names it by."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from thrifty.cli.data import prune
from thrifty.core.score_file import ExampleScores, ScoreProvenance, scores_bytes

EXAMPLES = 200


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    facts = ScoreProvenance("el2n", "some examples", label_names=("a", "b", "c", "d"), seeds=(0,))
    values = torch.rand(EXAMPLES, generator=torch.Generator().manual_seed(0))
    content = scores_bytes(ExampleScores(values, values[None], facts, torch.arange(EXAMPLES) % 4))
    (path := tmp_path / "scores.safetensors").write_bytes(content)
    return path


def told(scores: Path, *words: str) -> Result:
    done = CliRunner().invoke(prune, [str(scores), *words])
    assert done.exception is None, done.exception
    return done


def test_a_choice_is_counted_by_label_and_named(scores: Path) -> None:
    words = ("--keep-fraction", "0.5", "--drop-hardest", "0.1", "--min-class-share", "0.25")
    output = told(scores, *words).stdout
    rows = {row.split()[0]: [int(number) for number in row.split()[1:]] for row in output.splitlines()[1:6]}
    assert rows["all"] == [EXAMPLES, 100, 100] and rows["a"][0] == 50
    assert "hardest examples dropped: 20" in output
    assert "drop_hardest=0.1" in output and "min_class_share = 0.25" in output
    facts = json.loads(told(scores, *words, "--json").stdout)
    assert (facts["examples"], facts["kept"], facts["technique"]) == (EXAMPLES, 100, "data_selection.prune")
    assert facts["settings"]["drop_hardest"] == 0.1 and {row["label"] for row in facts["labels"]} == {*"abcd"}


def test_an_empty_hardest_part_is_not_printed(scores: Path) -> None:
    assert "hardest examples dropped" not in told(scores, "--order", "easy").stdout
