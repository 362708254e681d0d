"""Key-value caches that models of transformers fill in training."""

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


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("how", ["memory.recompute", "memory.optimal_recompute", "memory.activation_budget"])
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
            thrifty.apply(model, technique, **({"bytes": 0.5} if technique == "memory.optimal_recompute" else {}))
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*grads)
