"""Export of a run's adapter alone for PEFT, with the exported base or the original one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from fast_techniques import WITHOUT_FAST

from thrifty.training.trained_model import load_trained_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = (torch.arange(32)[None] * 7) % 320
LORA = ("--with", 'adapters.lora:rank=3,slices=qv,also="blocks.1.*norm|layers.1.*norm"')
QUICK = ("--with", "optimizers.adamw:lr=0.03")


def as_trained(thrifty: CommandLine, run: str) -> torch.Tensor:
    model, _ = load_trained_model(thrifty.run(run))
    with torch.no_grad():
        return model.logits(TOKENS)


def by_peft(base: Path, adapter: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, adapter)(input_ids=TOKENS).logits


@pytest.mark.sampled(1)
@pytest.mark.parametrize("preset", ["llama-nano", "gpt-nano"])
def test_peft_loads_an_exported_adapter_onto_the_exported_base(thrifty: CommandLine, preset: str) -> None:
    thrifty.train("run", *LORA, *QUICK, steps=12, model__preset=preset)
    thrifty("export", "run", "base", "--part", "base")
    exported = thrifty.json("export", "run", "adapter", "--part", "adapter")
    tokenizer = ["tokenizer.json", "tokenizer_config.json"]
    assert exported["files"] == ["README.md", "adapter_config.json", "adapter_model.safetensors", *tokenizer]
    folder = thrifty.folder
    assert 'library_name: "peft"' in (folder / "adapter" / "README.md").read_text()
    assert not (folder / "base" / "README.md").exists()
    wanted = as_trained(thrifty, "run")
    torch.testing.assert_close(by_peft(folder / "base", folder / "adapter"), wanted, rtol=1e-4, atol=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    assert (base(TOKENS).logits - wanted).abs().max() > 0.1


@pytest.mark.slow
def test_an_adapter_of_a_transformers_model_names_its_base(thrifty: CommandLine) -> None:
    torch.manual_seed(0)
    config: Any = transformers.GPTNeoXConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64, vocab_size=320,
        max_position_embeddings=64,
    )  # fmt: skip
    model = (thrifty.folder / "model").resolve()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    sizes = {"data.vocabulary": 320, "data.length": 32, "data.batch": 8, "evaluation.examples": 8}
    words = [word for path, value in sizes.items() for word in ("--set", f"{path}={value}")]
    words += [*WITHOUT_FAST, *QUICK]
    words += ["--with", "adapters.lora:rank=3", "--data", str((thrifty.folder / "corpus").resolve())]
    thrifty("train", "text", "--name", "run", "--model", str(model), "--budget", "12steps", *words)
    thrifty("export", "run", "adapter", "--part", "adapter")
    settings = json.loads((thrifty.folder / "adapter" / "adapter_config.json").read_text())
    base = Path(settings["base_model_name_or_path"])
    assert base == model and settings["task_type"] == "CAUSAL_LM"
    in_peft = by_peft(base, thrifty.folder / "adapter")
    torch.testing.assert_close(in_peft, as_trained(thrifty, "run"), rtol=1e-4, atol=1e-4)


def test_a_run_without_an_adapter_is_refused(thrifty: CommandLine) -> None:
    thrifty.train("run", steps=2)
    message = thrifty("export", "run", "adapter", "--part", "adapter", exit_code=2).stderr
    assert "no adapter" in message and not (thrifty.folder / "adapter").exists()
