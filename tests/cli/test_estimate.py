"""`thrifty estimate`: what the public function returns, on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import thrifty
from thrifty.cli.estimate import command

MODEL = """
from torch import nn

def build(width):
    return nn.Sequential(nn.Embedding(512, width), nn.Linear(width, 512))
"""


def test_a_preset_that_does_not_fit_exits_3_with_options() -> None:
    words = ["llama-nano", "--batch", "2", "--length", "16", "--memory", "16MB", "--allow", "exact", "--json"]
    done = CliRunner().invoke(command, words)
    facts = json.loads(done.stdout)
    assert done.exit_code == 3 and not facts["fits"] and facts["memory"] == 16e6
    assert facts["peak"] == thrifty.estimate("llama-nano", 2, length=16).peak


def test_a_function_of_ones_own_is_estimated_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "estimated_own.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    words = ["estimated_own:build", "--model-arg", "width=16", "--data", "text.txt", "--length", "32", "--batch", "2"]
    done = CliRunner().invoke(command, [*words, "--with", "gradients.clip:max_norm=2", "--device", "h100", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["parameters"] == 512 * 16 + 16 * 512 + 512
