"""Attention of architectures of transformers: all are found, and a window over all tokens changes nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.attention_cores import AttentionCore
from thrifty.modeling.attention_sites import find_attention_sites
from thrifty.techniques.attention.window import WindowAttention

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
OF_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}
OF_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
OF_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 32,
}  # fmt: skip
OF_SWIN = {
    "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "image_size": 16, "patch_size": 2,
}  # fmt: skip
OF_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
OF_GPTJ = OF_GPT2 | {"rotary_dim": 4}
OF_FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
OF_GPTNEO = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "vocab_size": 99,
    "window_size": 4, "intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
t = transformers
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT, num_key_value_heads=2)), 2),
    "Qwen3": (lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8)), 2),
    "GPT2": (lambda: t.GPT2LMHeadModel(t.GPT2Config(**OF_GPT2)), 2),
    "GPTNeoX": (lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**TEXT)), 2),
    "Bloom": (lambda: t.BloomForCausalLM(t.BloomConfig(**OF_BLOOM)), 2),
    "GPTJ": (lambda: t.GPTJForCausalLM(t.GPTJConfig(**OF_GPTJ)), 2),
    "GPTNeo": (lambda: t.GPTNeoForCausalLM(t.GPTNeoConfig(**OF_GPTNEO)), 2),
    "Falcon": (lambda: t.FalconForCausalLM(t.FalconConfig(**OF_FALCON)), 2),
    "Falcon with biases": (lambda: t.FalconForCausalLM(t.FalconConfig(**OF_FALCON, alibi=True)), 2),
    "Bert": (lambda: t.BertForMaskedLM(t.BertConfig(**TEXT)), 2),
    "DebertaV2": (
        lambda: t.DebertaV2ForMaskedLM(
            t.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
        ),
        2,
    ),
    "T5": (lambda: t.T5ForConditionalGeneration(t.T5Config(**OF_T5, decoder_start_token_id=0)), 4),
    "Bart": (lambda: t.BartForConditionalGeneration(t.BartConfig(**OF_BART)), 4),
    "ViT": (lambda: t.ViTForImageClassification(t.ViTConfig(**IMAGE)), 2),
    "DeiT": (lambda: t.DeiTForImageClassificationWithTeacher(t.DeiTConfig(**IMAGE)), 2),
    "Beit": (lambda: t.BeitForImageClassification(t.BeitConfig(**IMAGE, use_relative_position_bias=True)), 2),
    "Swin": (lambda: t.SwinForImageClassification(t.SwinConfig(**OF_SWIN)), 4),
    "Siglip": (lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**IMAGE)), 2),
    "CLIP": (lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**IMAGE)), 2),
}
"""Models, each with its number of self-attention modules."""


def outputs(model: nn.Module) -> list[Tensor]:
    """Return an output and all gradients in evaluation mode, for a text with padding or for images."""
    generator = torch.Generator().manual_seed(1)
    if "pixel" in model.main_input_name:
        out = model(pixel_values=torch.randn(2, 3, 16, 16, generator=generator))
    else:
        tokens, keep = torch.randint(1, 99, (2, 12), generator=generator), torch.ones(2, 12, dtype=torch.long)
        keep[0, -3:] = 0
        out = model(input_ids=tokens, attention_mask=keep, labels=tokens)
    value = next(each for name in ("logits", "pooler_output") if (each := getattr(out, name, None)) is not None)
    weights = torch.randn(value.shape, generator=generator)
    if value.ndim == 3:  # losses ignore padding
        weights[0, -3:] = 0
    (value * weights).sum().backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for parameter in model.parameters():  # tables of position biases start at zero
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_window_over_all_tokens_changes_nothing(name: str) -> None:
    plain, replaced = build(name), build(name)
    assert len(find_attention_sites(replaced)) == MODELS[name][1]
    WindowAttention(window=64, block=4).model(replaced)
    called = []
    for site in find_attention_sites(replaced):
        site.put(partial(noted_call, called, site.name, site.current))
    torch.testing.assert_close(outputs(replaced), outputs(plain), rtol=1e-3, atol=1e-4)
    assert {*called} == {site.name for site in find_attention_sites(replaced)}


def noted_call(called: list[str], name: str, core: AttentionCore, *args: Any, **options: Any) -> Tensor:
    called.append(name)
    return core(*args, **options)


@pytest.mark.parametrize("name", ["Bert", "Bart", "ViT"])
def test_dropout_of_attention_trains(name: str) -> None:
    model = build(name)
    for site in find_attention_sites(model):
        for attribute in ("attention_dropout", "dropout_prob", "dropout"):
            if isinstance(getattr(site.module, attribute, None), float):
                setattr(site.module, attribute, 0.5)
    WindowAttention(window=4, block=4).model(model)
    results = [outputs(model.train())[0] for _ in range(2)]
    assert not torch.equal(*results)


def test_a_model_that_keeps_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(RefusedError, match=r"Llama.* did not change the attention function of model\.layers\.0"):
        WindowAttention().model(model)


def test_each_model_in_a_wrapper_calls_its_cores() -> None:
    towers, called = nn.ModuleDict({name: build(name) for name in ("Bert", "ViT")}), []
    before = [tower.config._attn_implementation for tower in towers.values()]
    sites = find_attention_sites(towers)
    for site in sites:
        site.put(partial(noted_call, called, site.name, site.current))
    for tower in towers.values():
        outputs(tower)
    assert len(sites) == 4 and {*called} == {site.name for site in sites}
    for site in sites:
        site.take_away()
    assert [tower.config._attn_implementation for tower in towers.values()] == before
