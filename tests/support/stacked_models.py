"""Tiny random models of many architectures, each with a loss on a fixed batch: what surgery must find its way in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 48, 32, 4, 64, 32
TOKENS = torch.arange(16).repeat(2, 1) + torch.arange(2)[:, None]
TARGETS = (TOKENS * 7 + 3) % VOCABULARY
LABELS = torch.tensor([0, 1, 1, 1])  # not balanced, so that there is something to learn before an image is seen
PIXELS = torch.linspace(-1, 1, 4 * 3 * 16 * 16).sin().view(4, 3, 16, 16)


@dataclass(frozen=True)
class Kind:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    stacks: dict[str, int]
    """The number of blocks of each stack."""
    writers: dict[str, tuple[str, ...]]
    """For each stack, the layers of a block that write into the residual stream, in order."""

    def model(self) -> nn.Module:
        """With the same random values at every call, and without dropout."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.train()


def _labelled(**inputs: Any) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(**inputs).loss


def _theirs(architecture: str, configuration: str, **settings: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{configuration}Config")(vocab_size=VOCABULARY, **settings)
    return lambda: getattr(transformers, architecture)(config)


def _ours(style: str, depth: int = 3, tied: bool = True, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        kv_heads = 2 if style == "llama" else HEADS
        model = assemble(
            ModelConfig(style, depth, WIDTH, HEADS, kv_heads, HIDDEN, VOCABULARY, LENGTH, tied, **settings)
        )
        initialize(model, 0)
        return model

    return build


def gpt(depth: int = 3, tied: bool = True) -> nn.Module:
    return _ours("gpt", depth, tied)()


def _logits(*inputs: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model.logits(*inputs).flatten(0, 1), TARGETS.flatten())


class Written(nn.Module):
    """A ViT as users write them, from torch's own parts: `nn.MultiheadAttention` and an unnamed `nn.Sequential`."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm1(x)
            x = x + self.attention(y, key=y, value=y, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).mT + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class TorchEncoder(nn.Module):
    """torch's own encoder, whose layers have a shortcut for evaluation that calls none of their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


_LM = _labelled(input_ids=TOKENS, labels=TARGETS)
_SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": HIDDEN, "num_hidden_layers": 3}
_LONG = {"max_position_embeddings": LENGTH}
_NO_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": HIDDEN, "num_heads": HEADS, "num_layers": 3, "use_cache": False}
_SIDES = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": HEADS, "dropout": 0.0,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, **_LONG, **_NO_SPECIAL,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
_OURS = ("attention.out", "mlp.down")
_LLAMA = ("self_attn.o_proj", "mlp.down_proj")
_BART = ("self_attn.out_proj", "fc2")
_BART_CROSS = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")
_OURS_CROSS = ("attention.out", "cross_attention.out", "mlp.down")

OURS = {
    "our llama": Kind(_ours("llama"), _logits(TOKENS), {"blocks": 3}, {"blocks": _OURS}),
    "our gpt": Kind(_ours("gpt"), _logits(TOKENS), {"blocks": 3}, {"blocks": _OURS}),
    "our untied gpt": Kind(_ours("gpt", tied=False), _logits(TOKENS), {"blocks": 3}, {"blocks": _OURS}),
    "our bert": Kind(_ours("bert"), _logits(TOKENS), {"blocks": 3}, {"blocks": _OURS}),
    "our t5": Kind(
        _ours("t5", activation="gated-gelu_tanh", decoder_depth=2, fixed_head_width=4), _logits(TOKENS, TOKENS),
        {"encoder.blocks": 3, "decoder.blocks": 2}, {"encoder.blocks": _OURS, "decoder.blocks": _OURS_CROSS},
    ),
    "our marian": Kind(
        _ours("marian"), _logits(TOKENS, TOKENS),
        {"encoder.blocks": 3, "decoder.blocks": 3}, {"encoder.blocks": _OURS, "decoder.blocks": _OURS_CROSS},
    ),
}  # fmt: skip

THEIRS = {
    "bert": Kind(
        _theirs("BertForMaskedLM", "Bert", **_SIZES, **_LONG), _LM,
        {"bert.encoder.layer": 3}, {"bert.encoder.layer": ("attention.output.dense", "output.dense")},
    ),
    "gpt2": Kind(
        _theirs(
            "GPT2LMHeadModel", "GPT2", n_embd=WIDTH, n_inner=HIDDEN, n_layer=3, n_head=HEADS, n_positions=LENGTH,
            **_NO_SPECIAL,
        ),
        _LM, {"transformer.h": 3}, {"transformer.h": ("attn.c_proj", "mlp.c_proj")},
    ),
    "t5": Kind(
        _theirs("T5ForConditionalGeneration", "T5", **_T5, dropout_rate=0.0, decoder_start_token_id=0), _LM,
        {"encoder.block": 3, "decoder.block": 3},
        {
            "encoder.block": ("layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
            "decoder.block": ("layer.0.SelfAttention.o", "layer.1.EncDecAttention.o", "layer.2.DenseReluDense.wo"),
        },
    ),
    "vit": Kind(
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**_SIZES, image_size=16, patch_size=4, num_labels=4)
        ),
        _labelled(pixel_values=PIXELS, labels=LABELS),
        {"vit.layers": 3}, {"vit.layers": ("attention.o_proj", "mlp.fc2")},
    ),
    "llama": Kind(
        _theirs("LlamaForCausalLM", "Llama", **_SIZES, num_key_value_heads=2, **_NO_SPECIAL), _LM,
        {"model.layers": 3}, {"model.layers": _LLAMA},
    ),
    "gpt_neox": Kind(
        _theirs("GPTNeoXForCausalLM", "GPTNeoX", **_SIZES, **_NO_SPECIAL), _LM,
        {"gpt_neox.layers": 3}, {"gpt_neox.layers": ("attention.dense", "mlp.dense_4h_to_h")},
    ),
    "opt": Kind(
        _theirs(
            "OPTForCausalLM", "OPT", hidden_size=WIDTH, num_hidden_layers=3, ffn_dim=HIDDEN,
            num_attention_heads=HEADS, word_embed_proj_dim=16, dropout=0.0, **_LONG, **_NO_SPECIAL,
        ),
        _LM, {"model.decoder.layers": 3}, {"model.decoder.layers": _BART},
    ),
    "marian": Kind(
        _theirs("MarianMTModel", "Marian", **_SIDES, scale_embedding=True), _LM,
        {"model.encoder.layers": 2, "model.decoder.layers": 3},
        {"model.encoder.layers": _BART, "model.decoder.layers": _BART_CROSS},
    ),
    "qwen3": Kind(  # norms of queries and keys
        _theirs("Qwen3ForCausalLM", "Qwen3", **_SIZES, num_key_value_heads=2, head_dim=8, **_NO_SPECIAL), _LM,
        {"model.layers": 3}, {"model.layers": _LLAMA},
    ),
    "phi3": Kind(  # the last layer of attention defined before the others, everything fused
        _theirs("Phi3ForCausalLM", "Phi3", **_SIZES, num_key_value_heads=2, **_NO_SPECIAL), _LM,
        {"model.layers": 3}, {"model.layers": _LLAMA},
    ),
}  # fmt: skip

WRITTEN = {
    "a user's vit": Kind(
        Written, lambda model: F.cross_entropy(model(PIXELS), LABELS),
        {"blocks": 3}, {"blocks": ("attention", "mlp.2")},
    ),
    "torch's encoder": Kind(
        TorchEncoder, _logits(TOKENS), {"encoder.layers": 3}, {"encoder.layers": ("self_attn", "linear2")}
    ),
}  # fmt: skip

KINDS = OURS | THEIRS | WRITTEN
