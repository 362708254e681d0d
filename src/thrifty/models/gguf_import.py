"""Conversion of a GGUF file of a Llama model to a Hugging Face folder that can be trained (extra `gguf`).

GGUF is the format of llama.cpp: one file with settings, tokenizer and weights, mostly quantized in blocks of a few
bits. The weights are dequantized to float32; the quantization error remains. In GGUF, rotary positions pair adjacent
channels; in Thrifty and transformers they pair channels of the two halves of a head. The rows of query and key weights
are therefore reordered.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from thrifty.models.families import FAMILIES
from thrifty.models.hf_config import write_config
from thrifty.models.hf_folder import write_json, write_weights, written_aside
from thrifty.models.model_config import ModelConfig

SPELLED = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a block's tensors in GGUF, mapped to names in transformers."""
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SPLITTERS = {"gpt-2": lambda: [], "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True)]}
"""Pre-tokenizers that precede GPT-2's pattern, by the value of `tokenizer.ggml.pre`."""
CONTROL = 3
"""Type number of control tokens, which represent no text."""


def convert_gguf(file: Path, folder: Path) -> ModelConfig:
    """Convert a GGUF file of a Llama model to a new folder with config.json, safetensors and tokenizer. Return the
    model's shape. Raise UsageError without the package gguf, and RefusedError for another architecture or tokenizer.
    Raise IntegrityError if the file is damaged or its tensors do not match its settings."""
    reader = _open(file)
    settings = _Settings(reader, file)
    shape = _shape(settings, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    tensors = dict(_weights(reader, shape))
    expected = {name for packing in FAMILIES["llama"].table(shape) for name in packing.theirs}
    expected |= set() if shape.tied else {"lm_head.weight"}
    if tensors.keys() != expected:
        unmatched = sorted(tensors.keys() ^ expected)
        raise IntegrityError(
            f"the tensors of {str(file)!r} do not match its settings: {unmatched[:3]} ({len(unmatched)} in all)",
            fix="fetch the file again",
        )
    tokenizer, special = _tokenizer(settings), _special(settings)
    with written_aside(folder) as aside:
        write_weights(aside, tensors)
        ids = {f"{part}_id": number for part, (_, number) in special.items()}
        write_json(aside / "config.json", write_config(shape) | ids | {"dtype": "float32"})
        write_json(aside / "generation_config.json", ids)
        tokenizer.save(str(aside / "tokenizer.json"))
        words = {part: word for part, (word, _) in special.items()}
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.length}
        write_json(aside / TOKENIZER_CONFIG, kind | words | {"clean_up_tokenization_spaces": False})
        if template := settings.get("tokenizer.chat_template"):
            (aside / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return shape


def half_split(matrix: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key matrix for another form of rotary positions: pairs of adjacent channels become
    pairs across the two halves. The matrix is (heads · k, …) with head width k."""
    pairs = matrix.unflatten(0, (heads, -1, 2))  # (heads, k/2, 2, …)
    return pairs.transpose(1, 2).flatten(0, 2)


class _Settings:
    """The key-value pairs of a GGUF file; a missing key raises RefusedError with its name."""

    def __init__(self, reader: Any, file: Path):
        self.reader, self.file = reader, file

    def get(self, key: str) -> Any:
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise RefusedError(f"'{self.file}' has no setting {key!r}", fix="pass a GGUF file of a Llama model")
        return value


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UsageError(
            "GGUF weights require the package gguf, which is not installed", fix="pip install 'thrifty[gguf]'"
        ) from error
    try:
        return GGUFReader(file)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise IntegrityError(f"'{file}' is not a readable GGUF file: {error}", fix="fetch the file again") from error


def _shape(settings: _Settings, tied: bool) -> ModelConfig:
    if settings["general.architecture"] != "llama":
        raise RefusedError(
            f"{str(settings.file)!r} is a {settings['general.architecture']!r} model; only 'llama' can be converted",
            fix="use a GGUF file of a Llama model; or use the original Hugging Face folder of this model",
        )
    if settings.get("llama.rope.scaling.type") not in (None, "none"):
        raise RefusedError(
            f"{str(settings.file)!r} scales its rotary positions, which cannot be converted",
            fix="use the original Hugging Face folder of this model",
        )
    heads = settings["llama.attention.head_count"]
    return ModelConfig(
        style="llama",
        depth=settings["llama.block_count"],
        width=settings["llama.embedding_length"],
        heads=heads,
        kv_heads=settings.get("llama.attention.head_count_kv") or heads,
        hidden=settings["llama.feed_forward_length"],
        vocabulary=len(settings["tokenizer.ggml.tokens"]),
        length=settings["llama.context_length"],
        tied=tied,
        # stored in float32: 1e-5 is read as 9.99999974e-06
        norm_eps=float(f"{settings['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_base=float(settings.get("llama.rope.freq_base") or 10_000.0),
    )


def _weights(reader: Any, shape: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in float32 under the names of transformers."""
    from gguf import dequantize

    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    for stored in reader.tensors:
        if stored.name == "rope_freqs.weight":  # follows from the settings
            continue
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
        part, *rest = stored.name.removesuffix(".weight").split(".")
        if part != "blk":
            yield f"{OUTSIDE.get(part, part)}.weight", tensor
            continue
        block, name = rest
        if name in heads:
            tensor = half_split(tensor, heads[name])
        yield f"model.layers.{block}.{SPELLED.get(name, name)}.weight", tensor.contiguous()


def _tokenizer(settings: _Settings) -> Tokenizer:
    """Return the byte-level BPE of the file."""
    kind, splitter = settings["tokenizer.ggml.model"], settings.get("tokenizer.ggml.pre") or "gpt-2"
    if kind != "gpt2" or splitter not in SPLITTERS:
        raise RefusedError(
            f"{str(settings.file)!r} has a tokenizer of kind {kind!r} with {splitter!r}; only 'gpt2' with "
            f"{list(SPLITTERS)} can be converted",
            fix="use the original Hugging Face folder of this model",
        )
    words = settings["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    pattern = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*SPLITTERS[splitter](), pattern])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = settings["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return tokenizer


def _special(settings: _Settings) -> dict[str, tuple[str, int]]:
    """Return text and id of each special token by its role in transformers, such as eos_token."""
    words = settings["tokenizer.ggml.tokens"]
    parts = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    numbers = {part: settings.get(f"tokenizer.ggml.{name}_token_id") for part, name in parts.items()}
    return {part: (words[number], number) for part, number in numbers.items() if number is not None}
