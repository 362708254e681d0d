"""Models as users write them: a nanoGPT, a classifier around torch's own encoder, and three kinds of transformers, with
data and losses."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, WIDTH = 24, 12, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


class Sequences(Dataset):
    """Rows of tokens; the label says whether the first is in the lower half."""

    def __init__(self, count: int, seed: int = 0):
        self.rows = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"tokens": row, "label": (row[0] < VOCABULARY // 2).long()}


def build_gpt() -> nn.Module:
    return NanoGPT()


def build_classifier() -> nn.Module:
    return Classifier()


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)


def label_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["label"], reduction="none")


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["tokens"]).argmax(-1) == batch["label"]).float()


def language_work() -> dict[str, Any]:
    return {"model": build_gpt, "data": Sequences(64), "held_out": Sequences(32, 1), "loss": language_loss}


def label_work() -> dict[str, Any]:
    data = {"data": Sequences(64), "held_out": Sequences(32, 1)}
    return {"model": build_classifier, **data, "loss": label_loss, "metrics": {"accuracy": accuracy}}


def build_llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))


def build_bert() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))


def build_t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["tokens"]).logits, batch["label"], reduction="none")


def copy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"], labels=batch["tokens"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["tokens"], reduction="none").mean(1)


def causal_work() -> dict[str, Any]:
    return {**language_work(), "model": build_llama, "loss": causal_loss}


def class_work() -> dict[str, Any]:
    return {**language_work(), "model": build_bert, "loss": class_loss}


def copy_work() -> dict[str, Any]:
    return {**language_work(), "model": build_t5, "loss": copy_loss}
