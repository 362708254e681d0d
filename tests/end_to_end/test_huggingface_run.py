"""Import of models from other libraries, and export to them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine, assert_equal, beside, kill, wait_until
from fast_techniques import WITHOUT_FAST

from thrifty.training.trained_model import load_trained_model

transformers = pytest.importorskip("transformers")

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 64}
CONFIGS: dict[str, Any] = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL, vocab_size=320, intermediate_size=64),
    "opt": lambda: transformers.OPTConfig(**SMALL, vocab_size=320, ffn_dim=64, word_embed_proj_dim=32),
}
CHOSEN = ("--with", "adapters.lora:rank=2", "--with", "memory.recompute", "--with", "precision.mixed")
SIZES = {"data.vocabulary": 320, "data.length": 32, "data.batch": 8, "evaluation.examples": 8}


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_a_foreign_architecture_with_techniques_resumes(thrifty: CommandLine, family: str) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(thrifty.folder / "model")
    words = ["--data", str((thrifty.folder / "corpus").resolve()), "--model", str(thrifty.folder / "model"), *CHOSEN]
    words += [word for path, value in SIZES.items() for word in ("--set", f"{path}={value}")]
    words += WITHOUT_FAST
    thrifty("train", "text", "--name", "whole", "--budget", "30steps", *words)
    often = ("--budget", "30steps", "--set", "checkpoints.every=1")
    process = thrifty.start("train", "text", "--name", "run", *words, *often)
    assert wait_until(lambda: (thrifty.run("run") / "checkpoints" / "step-00000003").is_dir(), process)
    kill(process)
    assert thrifty.json("resume", "run")["status"] == "finished"
    assert_equal(thrifty.tensors("run"), thrifty.tensors("whole"))
    trained = [name for name in thrifty.tensors("run") if name.startswith("optimizer/")]
    assert trained and all(name.endswith(("lora_a", "lora_b")) for name in trained)
    if family == "gpt_neox":
        assert_export_computes_the_same(thrifty)


def assert_export_computes_the_same(thrifty: CommandLine) -> None:
    thrifty("export", "run", "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(thrifty.folder / "out").eval()
    model, _ = load_trained_model(thrifty.run("run"))
    tokens = torch.arange(32)[None] + 40
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, model.head(model(tokens)))


ADDED = {"adapters": "adapters.lora:rank=4", "gains": "initializations.layer_scale:initial_value=0.5"}


@pytest.fixture(scope="session", params=[(preset, added) for preset in ("llama-nano", "gpt-nano") for added in ADDED])
def exported(common_folder: Path, request: pytest.FixtureRequest) -> tuple[CommandLine, str, Path]:
    """Return a trained and exported run with adapters or gains."""
    preset, added = request.param
    thrifty, name = beside(common_folder), f"{preset}-with-{added}"
    extra = ("--with", ADDED[added], "--with", "optimizers.adamw:lr=0.03")
    thrifty.train(name, *extra, steps=12, model__preset=preset)
    thrifty("export", f"runs/{name}", f"out-{name}")
    return thrifty, name, thrifty.folder / f"out-{name}"


@pytest.mark.sampled(1)
def test_an_export_computes_the_same_as_the_trained_model(
    exported: tuple[CommandLine, str, Path],
) -> None:
    thrifty, name, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not [key for key in theirs.state_dict() if "lora" in key or "gain" in key]
    tokens = (torch.arange(32)[None] * 7) % 320
    with torch.no_grad():
        mine = as_it_was_trained(thrifty, name).logits(tokens)
        torch.testing.assert_close(theirs(tokens).logits, mine, rtol=1e-5, atol=1e-5)
        plain, _ = load_trained_model(thrifty.run(name))
        torch.testing.assert_close(plain.logits(tokens), mine, rtol=1e-5, atol=1e-5)


def as_it_was_trained(thrifty: CommandLine, name: str) -> Any:
    """Return the model with its adapters or gains, at the values of the newest checkpoint."""
    from thrifty.recipes.recipe_toml import read_recipe
    from thrifty.training.run_setup import prepare_run

    tensors = thrifty.tensors(name)
    model = prepare_run(read_recipe(thrifty.run(name) / "recipe.toml"), quiet=True).run.build_model().eval()
    parameters = dict(model.named_parameters())
    assert any("lora_b" in key or "gain" in key for key in parameters)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(tensors[f"parameters/{key}"])
    assert all(parameter.abs().max() > 0 for key, parameter in parameters.items() if "lora_b" in key)
    return model


@pytest.mark.slow
def test_an_export_generates_the_tokens_of_thrifty_sample(exported: tuple[CommandLine, str, Path]) -> None:
    thrifty, name, folder = exported
    words = ("--prompt", "def heap(", "--tokens", "16", "--temperature", "0")
    shown = thrifty.json("sample", f"runs/{name}", *words)
    again = thrifty.json("sample", folder, *words)
    assert shown["new_tokens"] == again["new_tokens"] and shown["text"] == again["text"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    prompt = tokenizer("def heap(", return_tensors="pt")["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    end = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    generated = theirs.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=end)[
        0, prompt.shape[1] :
    ].tolist()
    assert generated[: len(shown["new_tokens"])] == shown["new_tokens"]
