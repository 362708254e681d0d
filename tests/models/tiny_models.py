"""Tiny Hugging Face models with random weights."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 300
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
    ),
    "gpt2-untied": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=56,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
        tie_word_embeddings=False,
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL, rms_norm_eps=1e-5),
    "llama-grouped": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "llama-tied": lambda: transformers.LlamaConfig(
        **SMALL,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
    "llama-scaled": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
}


def random_model(config: Any, seed: int = 0) -> Any:
    """A model whose every parameter is random: fresh biases and gains are 0 and 1 and would hide a mistake."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
