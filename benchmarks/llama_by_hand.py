"""Llama with torch's own tensor parallelism, written by hand without Thrifty.

Separate layers for queries, keys and values; whole hidden states between layers; embedding, head and loss are divided
along the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from thrifty.kernels.rotary_embedding import rotary_frequencies, rotary_table, rotate
from thrifty.models.model_config import ModelConfig


class Attention(nn.Module):
    def __init__(self, shape: ModelConfig):
        super().__init__()
        self.head_width, inner = shape.head_width, shape.heads * shape.head_width
        keys = shape.kv_heads * shape.head_width
        self.q, self.out = nn.Linear(shape.width, inner, bias=False), nn.Linear(inner, shape.width, bias=False)
        self.k, self.v = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape: ModelConfig):
        super().__init__()
        self.attention = Attention(shape)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width, eps=shape.norm_eps) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Model from tokens (b, t) to logits (b, t, v), which are divided along the vocabulary after `divided`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        tables = rotary_table(rotary_frequencies(shape.head_width, shape.rope_base), shape.length)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(self.norm(x))


def divided(model: Llama, mesh: DeviceMesh) -> Llama:
    """Return the model with its layers divided over the mesh."""
    columns, rows = ColwiseParallel, RowwiseParallel
    parallelize_module(
        model,
        mesh,
        {"token": rows(input_layouts=Replicate()), "head": columns(output_layouts=Shard(-1), use_local_output=False)},
    )
    for block in model.blocks:
        split = {f"attention.{name}": columns() for name in ("q", "k", "v")} | {"attention.out": rows()}
        parallelize_module(block, mesh, {**split, "gate": columns(), "up": columns(), "down": rows()})
    return model


def backward(model: Llama, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss, and leave gradients in the parameters."""
    with loss_parallel():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
    return loss.detach()


def whole_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients, divided and replicated."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if hasattr(p.grad, "full_tensor")])
    own = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if not hasattr(p.grad, "full_tensor")])
    return torch.hypot(norm.full_tensor(), own)
