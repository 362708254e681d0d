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
    "gpt1": lambda: transformers.OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    ),
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
T5_SIZES = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_heads": 4, "num_layers": 2}
MARIAN_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "init_std": 0.2,
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))},
}  # fmt: skip
TWO_SIDED: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**SMALL, hidden_act="gelu"),
    "bert-relu": lambda: transformers.BertConfig(**SMALL, hidden_act="relu", type_vocab_size=3, layer_norm_eps=1e-6),
    "t5-1.0": lambda: transformers.T5Config(**T5_SIZES),
    "t5-1.1": lambda: transformers.T5Config(
        **T5_SIZES,
        num_decoder_layers=3,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=20,
    ),
    "marian": lambda: transformers.MarianConfig(**MARIAN_SIZES, scale_embedding=True, activation_function="swish"),
    "marian-uneven": lambda: transformers.MarianConfig(
        **(MARIAN_SIZES | {"decoder_layers": 1}), share_encoder_decoder_embeddings=True
    ),
}
"""Encoders and encoder–decoders."""
AUTO = {
    "bert": transformers.AutoModelForMaskedLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "marian": transformers.AutoModelForSeq2SeqLM,
}


def random_model(config: Any, seed: int = 0, auto: Any = None) -> Any:
    """A model whose every parameter is random: fresh biases and gains are 0 and 1 and would hide a mistake."""
    torch.manual_seed(seed)
    model = (auto or AUTO.get(config.model_type, transformers.AutoModelForCausalLM)).from_config(config).eval()
    if getattr(config, "scale_decoder_outputs", True) is False:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))  # as published, a free head
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # Marian's fixed positions are none to be changed
                parameter.add_(0.05 * torch.randn_like(parameter))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model
