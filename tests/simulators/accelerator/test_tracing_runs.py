"""`thrifty trace` records a run on its held-out data, and a model folder on a text."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine, write_corpus

from thrifty.simulators.accelerator.trace_file import load_trace


@pytest.fixture(scope="module")
def thrifty(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("traced")
    write_corpus(folder / "corpus")
    command = CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})
    command.train("mine", steps=2)
    return command


def test_a_run_is_traced_and_simulated(thrifty: CommandLine) -> None:
    result = thrifty.json("trace", "mine", "--examples", 2, "--out", "mine.safetensors")
    assert result["provenance"]["run"] == "mine" and result["provenance"]["objective"] == "next_token"
    trace = load_trace(thrifty.folder / "mine.safetensors")
    for layer in trace.layers:
        assert layer.examples == 2 and (layer.kept() == np.tri(layer.queries, dtype=bool)).all()
    rows = thrifty.json("simulate", "attention", "--designs", "elsa,dense", "--trace", "mine.safetensors",
                        "--no-measure")["results"]  # fmt: skip
    assert [row["trace"] for row in rows] == ["mine", "mine"] and all(row["cycles"] > 0 for row in rows)


def test_loss_of_a_run_under_filter_masks(thrifty: CommandLine) -> None:
    words = ("simulate", "attention", "--designs", "elsa,dense", "--trace", "mine.safetensors", "--run", "mine",
             "--no-measure")  # fmt: skip
    result = thrifty.json(*words, "--filter", "exact", "--filter", "own", "--density", 0.1)
    plain, rows = result["held_out_loss"], {row["machine"]: row for row in result["results"]}
    assert 3 < plain < 7
    assert rows["dense, own"]["held_out_loss"] == rows["dense, exact"]["held_out_loss"] == pytest.approx(plain)
    for name in ("elsa, exact", "elsa, own"):
        assert 1e-6 < abs(rows[name]["held_out_loss"] - plain) < 1
    assert "held-out loss" in thrifty(*words).stdout
    shutil.copytree(thrifty.run("mine"), thrifty.run("other"))
    assert "the trace belongs to 'mine', not to 'other'" in thrifty(*words[:-2], "other", exit_code=2).stderr


def test_a_folder_is_traced_on_a_text(thrifty: CommandLine, tmp_path: Path) -> None:
    thrifty("export", "mine", "folder")
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 1\n" * 40)
    result = thrifty.json("trace", "folder", "--data", text, "--length", 16, "--examples", 3, "--out", "f.safetensors")
    assert (result["queries"], result["provenance"]["data"]) == (16, "text.txt")
    assert load_trace(thrifty.folder / "f.safetensors").layers[0].examples == 3
    assert "--data FILE" in thrifty("trace", "folder", exit_code=2).stderr
    assert "a context of 32 tokens" in thrifty("trace", "folder", "--data", text, "--length", 64, exit_code=2).stderr
    text.write_text("x")
    assert "tokens, fewer than the" in thrifty("trace", "folder", "--data", text, exit_code=2).stderr
