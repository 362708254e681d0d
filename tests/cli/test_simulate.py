"""`thrifty simulate cluster` and `published`: simulated steps, and their deviation from published runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from thrifty.cli.simulate import command
from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.published_runs import RUNS

KEPT = Path(__file__).parents[2] / "results/cluster/anchors.json"


def shown(*words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def told(*words: object) -> dict[str, Any]:
    return json.loads(shown(*words, "--json"))


def test_a_preset_on_a_box_of_eight() -> None:
    page = shown("cluster", "--model", "llama-nano", "--mesh", "tensor=2,pipeline=2,shard=2", "--zero", "1")
    assert "8 ranks of h100-box (shard 2, tensor 2, pipeline 2)" in page and "ZeRO 1" in page
    for word in ("compute", "pipeline bubble", "optimizer", "MFU", "tokens/s", "activations", "(fullest)"):
        assert word in page
    assert "DOES NOT FIT" not in page


def test_json_is_one_document_with_the_same_facts() -> None:
    found = told("cluster", "--model", "gpt3-175b", "--cluster", "selene-a100", "--ranks", "1024",
                 "--mesh", "tensor=8,pipeline=8", "--batch", "1536", "--recompute", "every")  # fmt: skip
    assert found["mesh"] == {"replicate": 16, "shard": 1, "tensor": 8, "pipeline": 8, "chunks": 1, "ranks": 1024}
    assert found["micro_batches"] == 96 and 0.3 < found["mfu"] < found["hfu"] < 0.6
    assert found["parameters"] == pytest.approx(175e9, rel=0.01) and found["published"] is None
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])


def test_a_trillion_parameters_on_16384_ranks() -> None:
    found = told("cluster", "--model", "gpt-1t", "--cluster", "h100-roce", "--ranks", "16384", "--mesh",
                 "tensor=8,pipeline=64,chunks=2", "--batch", "6144", "--recompute", "selective",
                 "--sequence-parallel")  # fmt: skip
    assert found["mesh"]["replicate"] == 32 and found["settings"]["schedule"] == "interleaved"
    assert len(found["memory"]) == 64 and all(rank["fits"] for rank in found["memory"])


def test_a_published_run_is_printed_with_its_measurement() -> None:
    found = told("cluster", "--model", "narayanan-18b")
    assert found["published"]["measured"] == 135e12 and found["mesh"]["ranks"] == 256
    assert found["hardware_flops"] == found["published"]["simulated"]
    assert "table 1: hardware_flops 1.35e+14" in shown("cluster", "--model", "narayanan-18b")
    changed = told("cluster", "--model", "narayanan-18b", "--recompute", "none")
    assert changed["step_seconds"] < found["step_seconds"]


def test_a_step_that_does_not_fit_is_reported() -> None:
    assert "DOES NOT FIT: rank 0 has 85.9 GB" in shown("cluster", "--model", "llama3-70b", "--mesh", "tensor=8")


def test_the_timeline_is_written_as_trace_and_picture(tmp_path: Path) -> None:
    trace, picture = tmp_path / "step.json", tmp_path / "step.png"
    words = ("cluster", "--model", "gpt1-nano", "--mesh", "pipeline=4,tensor=2", "--batch", "8")
    shown(*words, "--trace", trace, "--figure", picture)
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 2 * 8
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_folder_is_traced_without_its_weights(tmp_path: Path, kind: str) -> None:
    """One that is ours, and one that only transformers computes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=128, tie_word_embeddings=False, head_dim=16,
    )  # fmt: skip
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]]
    config.save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_config(config)
    found = told("cluster", "--model", tmp_path / "model", "--length", "64", "--mesh", "tensor=2")
    assert found["model"] == "model" and found["mesh"]["ranks"] == 8
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("preset", ["bert-nano", "t5-nano", "marian-nano", "gpt1-nano"])
def test_every_style_of_preset_can_be_simulated(preset: str) -> None:
    assert told("cluster", "--model", preset, "--cluster", "cpu-gloo")["step_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "gpt3-175c"), "there is no model 'gpt3-175c'"),
        (("--model", "llama-nano", "--cluster", "h100-rocket"), "unknown cluster"),
        (("--model", "llama-nano", "--mesh", "tensors=8"), "unknown key 'mesh.tensors'"),
        (("--model", "llama-nano", "--mesh", "tensor=eight"), "mesh.tensor must be a whole number, not 'eight'"),
        (("--model", "llama-nano", "--mesh", "tensor=3"), "8 ranks are not a multiple of the mesh's 3"),
        (("--model", "llama-nano", "--ranks", "4", "--mesh", "tensor=8"), "8 ranks, but the cluster has 4"),
        (("--model", "llama-nano", "--batch", "12"), "12 examples do not divide"),
        (("--model", "llama-nano", "--schedule", "2f2b"), "unknown pipeline schedule"),
        (("--model", "llama-nano", "--figure", "step.gif"), "does not end in .svg or .png or .pdf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_simulations_are_refused_with_the_fix(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        shown("cluster", *words)
    assert error.value.fix


def test_published_runs_are_listed_with_how_far_off_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: RUNS[name] for name in ("narayanan-18b", "narayanan-175b-zero-384", "llama3-405b-16384")}
    monkeypatch.setattr("thrifty.interface.cluster_simulation.RUNS", few)
    page = shown("published")
    kept = {run["run"]: run["off"] for run in json.loads(KEPT.read_text(encoding="utf-8"))["runs"]}
    for name in few:
        (row,) = [line for line in page.splitlines() if line.startswith(name)]
        assert f" {kept[name]:+.1%}" in row
    assert "not reproduced" in page and "chunks are not published" in page


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from thrifty.cli.main import main\n"
        "try: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    )
    for words in (["simulate", "--help"], ["simulate", "cluster", "--help"], ["data", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        assert done.returncode == 0 and "Assertion" not in done.stderr, done.stderr
