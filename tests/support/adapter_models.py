"""Tiny decoders of transformers with random weights, and models of this package with the same weights."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from thrifty.models.weight_conversion import import_folder

VOCABULARY, LENGTH = 300, 64
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "initializer_range": 0.2, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    ),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "llama-grouped": lambda: transformers.LlamaConfig(**_LLAMA, num_key_value_heads=2),
}  # fmt: skip
TOKENS = (torch.arange(24).view(2, 12) * 7) % VOCABULARY


def theirs(kind: str, seed: int = 0) -> Any:
    """Return a model of transformers in eval mode, equal at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def ours(kind: str, folder: Path) -> nn.Module:
    """Return the model of this package with the weights of transformers."""
    theirs(kind).save_pretrained(folder)
    return import_folder(folder)[0].eval()


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
