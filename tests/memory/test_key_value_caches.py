"""Key-value caches that models of transformers fill in training and in generation."""

from typing import Any

import pytest
import torch
import transformers

import thrifty

STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Bloom": {},
    "GPTNeoX": {},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 4},
    "Bamba": {"attn_layer_indices": [1], "num_key_value_heads": 2, "intermediate_size": 48, **STATES},
}
TECHNIQUES: dict[str, dict[str, float]] = {
    "memory.recompute": {}, "memory.optimal_recompute": {"bytes": 0.5}, "memory.activation_budget": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("how", TECHNIQUES)
def test_caches_are_left_out_of_recomputed_blocks(name: str, how: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": True}
    sizes |= SIZES[name]
    kind = getattr(transformers, f"{name}ForCausalLM")
    tokens = torch.randint(32, (2, 6))
    grads = []
    for technique in (None, how):
        torch.manual_seed(0)
        model = kind(kind.config_class(**sizes))
        if technique:
            thrifty.apply(model, technique, **TECHNIQUES[technique])
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("how", TECHNIQUES)
def test_generation_keeps_its_cache_under_recomputation(how: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None, initializer_range=0.5)
    logits = []
    for technique in (None, how):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if technique:
            thrifty.apply(model, technique, **TECHNIQUES[technique])
        text = model.eval().generate(
            torch.arange(3, 9)[None], max_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        logits.append(text.logits)
    torch.testing.assert_close(*logits)
