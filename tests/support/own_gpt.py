"""A GPT of a user, written by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, width: int, depth: int, vocabulary: int, context: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def build(width: int = 32, depth: int = 2, vocabulary: int = 320, context: int = 32) -> nn.Module:
    return NanoGPT(width, depth, vocabulary, context)


class Classifier(nn.Module):
    """A Transformer encoder over the patches of an image, with labels."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.label = nn.Linear(width, labels)

    def forward(self, images: Tensor) -> Tensor:
        return self.label(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


def build_classifier(width: int = 16, labels: int = 10) -> nn.Module:
    return Classifier(width, labels)
