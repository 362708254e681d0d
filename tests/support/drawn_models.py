"""Models of transformers with drawn sizes, and hand-written oddities, each with data and a loss."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

SIDE, LENGTH, LABELS, EXAMPLES = 32, 12, 3, 24


@dataclass(frozen=True)
class DrawnModel:
    name: str
    build: Callable[[], nn.Module]
    data: Dataset
    loss: Callable[[nn.Module, Any], Tensor]


class Rows(Dataset):
    """Dictionaries of tokens or images with labels, which models of transformers take by name."""

    def __init__(self, vocabulary: int = 0, labels: str = "tokens"):
        draws = torch.Generator().manual_seed(0)
        self.classes = torch.arange(EXAMPLES) % LABELS
        self.fields: dict[str, Tensor] = {"labels": self.classes}
        if vocabulary:
            tokens = torch.randint(3, vocabulary, (EXAMPLES, LENGTH), generator=draws)
            self.fields = {"input_ids": tokens, "labels": tokens.clone() if labels == "tokens" else self.classes}
        else:
            noise = torch.randn(EXAMPLES, 3, SIDE, SIDE, generator=draws)
            self.fields["pixel_values"] = noise + self.classes.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def classified(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    output = model(batch["pixel_values"])
    return F.cross_entropy(getattr(output, "logits", output), batch["labels"], reduction=reduction)


def next_tokens(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    tokens = batch["input_ids"]
    losses = F.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:], reduction=reduction)
    return losses.mean(1) if reduction == "none" else losses


CAUSAL = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "GPT2", "GPTNeoX", "GPTJ", "OPT", "Bloom",
    "Falcon", "Olmo2", "Cohere", "Mixtral", "Starcoder2",
)  # fmt: skip
MASKED = ("Bert", "Roberta", "Electra", "DistilBert", "Albert", "DebertaV2", "MPNet", "ModernBert", "XLMRoberta")
SEQ2SEQ = ("T5", "Bart", "Marian", "Pegasus", "MBart")
CLASSIFIERS = ("Bert", "Roberta", "DebertaV2", "Electra", "Llama", "GPT2")
VISION = ("ViT", "DeiT", "Beit", "Swin", "Swinv2", "Dinov2", "ViTMSN", "ConvNext", "Data2VecVision", "IJepa")
ENDS = {"causal": "ForCausalLM", "masked": "ForMaskedLM", "seq2seq": "ForConditionalGeneration",
        "classifier": "ForSequenceClassification", "vision": "ForImageClassification"}  # fmt: skip
NAMES = {"GPT2ForCausalLM": "GPT2LMHeadModel", "MarianForConditionalGeneration": "MarianMTModel"}
KINDS = {"causal": CAUSAL, "masked": MASKED, "seq2seq": SEQ2SEQ, "classifier": CLASSIFIERS, "vision": VISION}


def drawn_model(seed: int) -> DrawnModel:
    """Return the model of a seed: of transformers, or one of ten times a hand-written oddity."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        name = draw.choice([*ODDITIES])
        build, data, loss = ODDITIES[name]
        return DrawnModel(name, build, data, loss)
    kind = draw.choice([*KINDS])
    family = draw.choice(KINDS[kind])
    name = NAMES.get(f"{family}{ENDS[kind]}", f"{family}{ENDS[kind]}")
    model = getattr(transformers, name)
    vocabulary = draw.choice([37, 64, 101])
    sizes = sizes_of(draw, family, kind, vocabulary)
    labels = "classes" if kind == "classifier" else "tokens"
    data = Rows(0 if kind == "vision" else vocabulary, labels)
    build = partial(built, model, sizes)
    return DrawnModel(f"{name} {sizes}", build, data, classified if kind == "vision" else own_loss)


def built(model: Any, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return model(model.config_class(**sizes))


def sizes_of(draw: random.Random, family: str, kind: str, vocabulary: int) -> dict[str, Any]:
    """Return drawn sizes by the names of a family's configuration."""
    heads, each, depth = draw.choice([2, 4]), draw.choice([8, 16]), draw.choice([2, 3])
    width, hidden = heads * each, draw.choice([32, 48])
    if kind == "vision":
        return _vision_sizes(draw, family, width, heads, depth, hidden)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": hidden, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "num_labels": LABELS, "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    if family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Mixtral", "Cohere", "Starcoder2", "Olmo2"):
        sizes["num_key_value_heads"] = draw.choice([each for each in (1, 2, 4) if heads % each == 0])
    if family in ("Qwen3", "Gemma", "Gemma2"):
        sizes["head_dim"] = each
    changes: dict[str, dict[str, Any]] = {
        "GPTJ": {"n_embd": width, "n_layer": depth, "n_head": heads, "n_positions": 32, "rotary_dim": each // 2},
        "GPT2": {"n_embd": width, "n_layer": depth, "n_head": heads, "n_positions": 32},
        "OPT": {"ffn_dim": hidden, "word_embed_proj_dim": width},
        "Bloom": {"n_layer": depth, "n_head": heads},
        "Albert": {"embedding_size": 16},
        "DistilBert": {"dim": width, "n_layers": depth, "n_heads": heads, "hidden_dim": hidden},
        "Electra": {"embedding_size": width},
        "Mixtral": {"num_local_experts": 3},
        "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2,
                     "head_dim": each},
        "DebertaV2": {"relative_attention": draw.random() < 0.5, "pos_att_type": ["p2c", "c2p"]},
        "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 8},
        "T5": {"d_model": width, "d_kv": each, "d_ff": hidden, "num_layers": depth, "num_heads": heads,
               "decoder_start_token_id": 0},
    }  # fmt: skip
    if kind == "seq2seq" and family != "T5":
        both = {"layers": depth, "attention_heads": heads, "ffn_dim": hidden}
        changes[family] = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in both.items()}
        changes[family] |= {"d_model": width, "decoder_start_token_id": 0}
    return sizes | changes.get(family, {})


def _vision_sizes(draw: random.Random, family: str, width: int, heads: int, depth: int, hidden: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"image_size": SIDE, "num_labels": LABELS}
    if family in ("Swin", "Swinv2"):
        window = draw.choice([2, 4])
        return sizes | {
            "patch_size": 4, "embed_dim": 16, "depths": [2, depth], "num_heads": [2, 2], "window_size": window,
        }  # fmt: skip
    if family == "ConvNext":
        return sizes | {"patch_size": 4, "hidden_sizes": [8, 16], "depths": [2, depth], "num_stages": 2}
    patch = draw.choice([4, 8])
    return sizes | {
        "patch_size": patch, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": hidden,
    }  # fmt: skip


class Attention(nn.Module):
    """Self-attention with one matrix for queries, keys and values, and optionally linear position biases (ALiBi)."""

    def __init__(self, width: int, heads: int, alibi: bool = False, causal: bool = True):
        super().__init__()
        self.heads, self.alibi, self.causal = heads, alibi, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.alibi:
            places = torch.arange(x.shape[1])
            slopes = 2.0 ** -torch.arange(1, self.heads + 1).view(-1, 1, 1)
            distance = (places[:, None] - places[None]).float()
            mask = (-slopes * distance).masked_fill(distance < 0, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class OddBlock(nn.Module):
    """Block with norms after the branches, or with both branches in parallel."""

    def __init__(self, width: int, form: str, **attention: Any):
        super().__init__()
        self.form, self.attention = form, Attention(width, 4, **attention)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "parallel":
            y = self.norm(x)
            return self.norm2(x) + self.attention(y) + self.mlp(y)
        if self.form == "after":
            x = self.norm(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class OddDecoder(nn.Module):
    def __init__(
        self, form: str = "before", shared: bool = False, depth: int = 3, vocabulary: int = 64, **attention: Any
    ):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(vocabulary, 32), nn.Parameter(0.1 * torch.randn(LENGTH, 32))
        block = OddBlock(32, form, **attention)
        self.blocks = nn.ModuleList(block if shared else OddBlock(32, form, **attention) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """Encoder of torch's layers that predicts masked tokens."""

    def __init__(self, vocabulary: int = 64, length: int = LENGTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(vocabulary, 32), nn.Embedding(length, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))


class StemVit(nn.Module):
    """Vision Transformer with a stem of convolutions, and positions added in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.GELU(), nn.Conv2d(32, 32, 2, 2)
        )
        self.start, self.places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(0.1 * torch.randn(1, 17, 32))
        self.blocks = nn.ModuleList(OddBlock(32, "before", causal=False) for _ in range(2))
        self.head = nn.Linear(32, LABELS)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        x = torch.cat((self.start.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


TEXT = Rows(64)
ODDITIES: dict[str, tuple[Callable[[], nn.Module], Dataset, Callable[..., Tensor]]] = {
    "norms after the branches": (partial(OddDecoder, "after"), TEXT, next_tokens),
    "parallel branches": (partial(OddDecoder, "parallel"), TEXT, next_tokens),
    "one block in three places": (partial(OddDecoder, shared=True), TEXT, next_tokens),
    "ALiBi": (partial(OddDecoder, alibi=True), TEXT, next_tokens),
    "a stem of convolutions": (StemVit, Rows(), classified),
}
