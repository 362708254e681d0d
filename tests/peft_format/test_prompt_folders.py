"""Prompts and prefixes in PEFT's format: both libraries load each other's folders with equal logits."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_models import CONFIGS, TOKENS, next_token_loss, ours, theirs
from safetensors.torch import load_file, save_file
from torch import nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.weight_conversion import import_folder
from thrifty.peft_format import load_adapter, save_adapter
from thrifty.techniques.adapters.prefix_tuning import PrefixTuning
from thrifty.techniques.adapters.prompt_tuning import PromptTuning

COUNT = 5
ADAPTERS = {
    "prompt": PromptTuning(tokens=COUNT),
    "prefix": PrefixTuning(tokens=COUNT, hidden=0),
    "prefix by a network": PrefixTuning(tokens=COUNT, hidden=8),
}
OF_PEFT = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT),
    "prefix by a network": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=COUNT, prefix_projection=True, encoder_hidden_size=8
    ),
}


def logits_here(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().logits(TOKENS) if hasattr(model, "task") else model.eval()(input_ids=TOKENS).logits


def logits_there(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits[:, -TOKENS.shape[1] :]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_written_folders_load_in_both_libraries(kind: str, adapter: str, tmp_path: Path) -> None:
    own = ours(kind, tmp_path / "base")
    shape = import_folder(tmp_path / "base")[1]
    bases = ((theirs(kind), None), (HuggingFaceCausalLM(theirs(kind)), None), (own, shape))
    for index, (base, given) in enumerate(bases):
        model = ADAPTERS[adapter].model(base)
        wanted = logits_here(model)
        save_adapter(model, tmp_path / str(index), shape=given)
        loaded = peft.PeftModel.from_pretrained(theirs(kind), str(tmp_path / str(index)))
        torch.testing.assert_close(logits_there(loaded), wanted, rtol=1e-4, atol=2e-5)
        for again, form in ((theirs(kind), None), (ours(kind, tmp_path / f"again{index}"), shape)):
            load_adapter(again, tmp_path / str(index), shape=form)
            torch.testing.assert_close(logits_here(again), wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_folders_of_peft_load_with_equal_logits(kind: str, adapter: str, tmp_path: Path) -> None:
    trained = peft.get_peft_model(theirs(kind), OF_PEFT[adapter]())
    optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], 0.05)
    for _ in range(3):
        next_token_loss(trained(input_ids=TOKENS).logits[:, -TOKENS.shape[1] :], TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.save_pretrained(str(tmp_path / "adapter"))
    for model in (theirs(kind), HuggingFaceCausalLM(theirs(kind)), ours(kind, tmp_path / "base")):
        load_adapter(model, tmp_path / "adapter", shape=None)
        torch.testing.assert_close(logits_here(model), logits_there(trained), rtol=1e-4, atol=2e-5)
        names = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
        assert names == {adapter.split()[0]}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_virtual_tokens_of_a_classifier_load_in_peft(adapter: str, tmp_path: Path) -> None:
    """For the classification task PEFT requires a head in the folder; without a task it ignores virtual tokens."""

    def base() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            pad_token_id=299,
        )  # fmt: skip
        return transformers.LlamaForSequenceClassification(config).eval()

    model = ADAPTERS[adapter].model(base())
    save_adapter(model, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter")).eval()
    plain, wanted = logits_here(base()), logits_here(model)
    assert not torch.allclose(wanted, plain, atol=1e-3)
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, wanted, rtol=1e-4, atol=2e-5)


def stored(tmp_path: Path, technique: PromptTuning | PrefixTuning) -> Path:
    save_adapter(technique.model(theirs("gpt2")), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("technique", [PromptTuning(tokens=3), PrefixTuning(tokens=3, hidden=0)])
def test_foreign_and_damaged_files_are_refused(technique: PromptTuning | PrefixTuning, tmp_path: Path) -> None:
    folder = stored(tmp_path, technique)
    wide = assemble(ModelConfig("gpt", 2, 64, 4, 4, 64, 300, 64, True))
    with pytest.raises(IntegrityError, match="for a model of width"):
        load_adapter(wide, folder)
    with pytest.raises(RefusedError, match="have no name"):
        load_adapter(theirs("gpt2"), folder, "second")
    model = theirs("gpt2")
    load_adapter(model, folder)
    with pytest.raises(UsageError, match="virtual tokens already"):
        load_adapter(model, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({"prompt_embeddings": tensors["prompt_embeddings"][:2].clone()}, folder / "adapter_model.safetensors")
    with pytest.raises(IntegrityError, match="no prompt_embeddings of 3 rows"):
        load_adapter(theirs("gpt2"), folder)


def test_adapters_outside_the_format_are_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path, PromptTuning(tokens=3))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"num_transformer_submodules": 2}))
    with pytest.raises(RefusedError, match="num_transformer_submodules = 2"):
        load_adapter(theirs("gpt2"), folder)
    encoder = assemble(ModelConfig("bert", 2, 32, 4, 4, 64, 300, 64, True))
    with pytest.raises(RefusedError, match="prefixes for the blocks of a decoder"):
        save_adapter(PrefixTuning(tokens=3, hidden=0).model(encoder), tmp_path / "other")


def test_prefixes_of_different_widths_are_refused(tmp_path: Path) -> None:
    model = theirs("llama")
    other = copy.deepcopy(model.config)
    other.num_key_value_heads = 1
    block = model.model.layers[1]
    block.self_attn = type(block.self_attn)(other, 1)
    model = PrefixTuning(tokens=3, hidden=0).model(model)
    with pytest.raises(RefusedError, match="of one width for all blocks"):
        save_adapter(model, tmp_path / "adapter")
