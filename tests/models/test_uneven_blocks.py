"""Export of pruned models: `transformers` loads them in the smaller shapes with the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SMALL
from torch import nn

from thrifty.core.run_notes import collect_notes
from thrifty.modeling.structured_pruning import find_units, prune_units
from thrifty.models import export_model
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM, HuggingFaceMaskedLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.models.weight_conversion import import_folder
from thrifty.techniques.growth._width_growth import narrow_networks

TOKENS = (torch.arange(24) * 7 % 60).view(2, 12)
KEPT = {"heads": ([1, 2], [0, 2, 3]), "neurons": ([*range(0, 24, 2)], [*range(5, 22)])}
"""Kept units of the first and the second of two blocks."""


def shape(style: str, heads: int = 4, kv_heads: int | None = None, width: int = 48) -> ModelConfig:
    return ModelConfig(style, 2, width, heads, kv_heads or heads, 24, 60, 16, tied=True)  # type: ignore[arg-type]


def slimmed(model: nn.Module) -> nn.Module:
    for index, pieces in enumerate(find_units(model).values()):
        kept = KEPT[pieces.kind][index // 2]
        prune_units(pieces, [piece for piece in kept if piece < pieces.count])
    return model.eval()


def of_ours(given: ModelConfig) -> nn.Module:
    model = assemble(given)
    initialize(model, 0, std=0.2)
    return slimmed(model)


def load(folder: Path, auto: str) -> Any:
    model, report = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


OURS: dict[str, tuple[ModelConfig, dict[str, int], str]] = {
    "llama": (shape("llama"), {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 17}, "17"),
    "llama with groups": (
        shape("llama", 8, 4), {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6}, "groups of 2 heads",
    ),
    "llama of a width that three heads do not divide": (
        shape("llama", width=32), {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}, "written as 4",
    ),
    "llama with one key": (
        shape("llama", 4, 1), {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}, "3",
    ),
    "gpt": (shape("gpt"), {"n_head": 4, "n_inner": 17}, "cannot describe fewer"),
    "bert": (shape("bert"), {"num_attention_heads": 4, "intermediate_size": 17}, "cannot describe fewer"),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("case", OURS)
def test_a_pruned_own_model_has_the_same_logits_in_transformers(case: str, tmp_path: Path) -> None:
    whole, sizes, note = OURS[case]
    model = of_ours(whole)
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    with collect_notes() as notes:
        export_model(model, whole, tmp_path / "out")
    loaded = load(tmp_path / "out", "AutoModelForMaskedLM" if whole.style == "bert" else "AutoModelForCausalLM")
    assert {name: getattr(loaded.config, name) for name in sizes} == sizes
    torch.testing.assert_close(loaded(TOKENS).logits, model.logits(TOKENS), rtol=1e-5, atol=1e-5)
    assert any("filled up with zeros" in text and note in text for text in notes)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before
    again, narrower = import_folder(tmp_path / "out")
    torch.testing.assert_close(again.logits(TOKENS), model.logits(TOKENS), rtol=1e-5, atol=1e-5)
    assert narrower.hidden == 17 and narrower.head_width == whole.head_width


@torch.no_grad()
def test_gpt1_keeps_its_shapes_in_its_format(tmp_path: Path) -> None:
    whole = ModelConfig("gpt1", 2, 8, 4, 4, 32, 60, 16, tied=True)
    model = assemble(whole)
    initialize(model, 0, std=0.2)
    for pieces in find_units(model).values():
        prune_units(pieces, range(1, pieces.count))
    export_model(model, whole, tmp_path / "out")
    loaded = load(tmp_path / "out", "AutoModelForCausalLM")
    assert loaded.config.n_head == 4
    torch.testing.assert_close(loaded(TOKENS).logits, model.eval().logits(TOKENS), rtol=1e-5, atol=1e-5)


WRAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "Llama": (
        lambda: HuggingFaceCausalLM(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))),
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 17},
    ),
    "Qwen2 with groups": (
        lambda: HuggingFaceCausalLM(
            transformers.Qwen2ForCausalLM(
                transformers.Qwen2Config(**SMALL | {"num_attention_heads": 8}, num_key_value_heads=4)
            )
        ),
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "intermediate_size": 17},
    ),
    "OPT": (
        lambda: HuggingFaceCausalLM(
            transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32))
        ),
        {"num_attention_heads": 4, "ffn_dim": 17},
    ),
    "DistilBERT": (
        lambda: HuggingFaceMaskedLM(
            transformers.DistilBertForMaskedLM(
                transformers.DistilBertConfig(vocab_size=300, dim=32, n_heads=4, n_layers=2, hidden_dim=48)
            )
        ),
        {"n_heads": 4, "hidden_dim": 17},
    ),
    "BERT": (
        lambda: HuggingFaceMaskedLM(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))),
        {"num_attention_heads": 4, "intermediate_size": 17},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", WRAPPED)
def test_a_pruned_model_of_transformers_loads_again(case: str, tmp_path: Path) -> None:
    make, sizes = WRAPPED[case]
    torch.manual_seed(0)
    model = slimmed(make())
    export_model(model, None, tmp_path / "out")
    loaded = load(tmp_path / "out", "AutoModelForMaskedLM" if "BERT" in case else "AutoModelForCausalLM")
    assert {name: getattr(loaded.config, name) for name in sizes} == sizes
    torch.testing.assert_close(loaded(TOKENS).logits, model.logits(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_a_growing_model_exports_at_its_current_width(tmp_path: Path, style: str) -> None:
    model = assemble(shape(style))
    initialize(model, 0, std=0.2)
    narrow_networks(model, 2)
    export_model(model, shape(style), tmp_path / "out")
    again, own_shape = import_folder(tmp_path / "out")
    assert own_shape.hidden == 12
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS), model.eval()(TOKENS))
