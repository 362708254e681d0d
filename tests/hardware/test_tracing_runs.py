"""`thrifty trace` of a run reads its held-out data, of a model folder the text that it is given."""

from pathlib import Path

import numpy as np
import pytest

from end_to_end.command_line import CommandLine, write_corpus
from thrifty.hardware.trace_file import load_trace


@pytest.fixture(scope="module")
def thrifty(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("traced")
    write_corpus(folder / "corpus")
    command = CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})
    command.train("mine", steps=2)
    return command


def test_a_run_is_traced_and_simulated(thrifty: CommandLine) -> None:
    found = thrifty.json("trace", "mine", "--examples", 2, "--out", "mine.safetensors")
    assert found["provenance"]["run"] == "mine" and found["provenance"]["objective"] == "next_token"
    trace = load_trace(thrifty.folder / "mine.safetensors")
    for layer in trace.layers:
        assert layer.examples == 2 and (layer.kept() == np.tri(layer.queries, dtype=bool)).all()
    rows = thrifty.json("simulate", "attention", "--designs", "elsa,dense", "--trace", "mine.safetensors")["results"]
    assert [row["trace"] for row in rows] == ["mine", "mine"] and all(row["cycles"] > 0 for row in rows)


def test_a_folder_is_traced_on_a_text(thrifty: CommandLine, tmp_path: Path) -> None:
    thrifty("export", "mine", "folder")
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 1\n" * 40)
    found = thrifty.json("trace", "folder", "--data", text, "--length", 16, "--examples", 3, "--out", "f.safetensors")
    assert (found["queries"], found["provenance"]["data"]) == (16, "text.txt")
    assert load_trace(thrifty.folder / "f.safetensors").layers[0].examples == 3
    assert "--data FILE" in thrifty("trace", "folder", exit_code=2).stderr
    assert "reads 32 tokens" in thrifty("trace", "folder", "--data", text, "--length", 64, exit_code=2).stderr
    text.write_text("x")
    assert "fewer than an example" in thrifty("trace", "folder", "--data", text, exit_code=2).stderr
