"""Random training steps on which no bound was tuned: a pure function of (seed, number).

Hand-written architectures with random parts, and models of `transformers` and, if installed, `timm` at random sizes,
each with a batch, a loss, an optimizer and a dtype. The interface is `random_step(seed, number)`.
"""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class RandomStep:
    label: str
    build: Callable[[], nn.Module]
    batch: Any
    loss: Loss | None
    """None for a model of transformers, which computes its own loss."""
    optimizer: Any
    """Class of torch.optim, or name of an optimizer of `thrifty.optim`."""


def random_step(seed: int, number: int) -> RandomStep:
    """Return the step of this seed and number; families alternate, everything else is random.

    Raise ImportError if its library is not installed.
    """
    draw = random.Random(f"{seed}/{number}")
    families = [*HAND_WRITTEN, transformers_step, transformers_step, transformers_step, timm_step, timm_step]
    family = families[(number + seed) % len(families)]
    torch.manual_seed(draw.getrandbits(32))
    label, build, batch, loss = family(draw)
    dtype = draw.choice([torch.float32] * 4 + [torch.bfloat16])
    autocast = draw.random() < 0.2 and dtype == torch.float32
    frozen = draw.random() < 0.15
    optimizer = draw.choice(OPTIMIZERS)
    if dtype != torch.float32:
        batch = _cast(batch, dtype)
    words = [label, str(dtype).removeprefix("torch."), getattr(optimizer, "__name__", optimizer)]
    words += ["autocast"] * autocast + ["half frozen"] * frozen
    if autocast:
        loss = partial(_under_autocast, loss or _own_loss)
    seed_of_values = draw.getrandbits(32)
    return RandomStep(", ".join(words), partial(_build, build, dtype, frozen, seed_of_values), batch, loss, optimizer)


OPTIMIZERS = [
    torch.optim.AdamW, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, "AdamW", "AdamW",
    "Sgd", "Lion", "Adafactor", "Muon",
]  # fmt: skip


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    move = torch.utils._pytree.tree_map
    return move(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch)


def _build(build: Callable[[], nn.Module], dtype: torch.dtype, frozen: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build().to(dtype)
    if frozen:
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)
    return model


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _under_autocast(loss: Loss, model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


# Parts of hand-written models


class RmsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype) * self.gain


class Squared(torch.autograd.Function):
    """Custom autograd function that saves its input and computes in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 2 * x.relu()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "tanh": torch.tanh, "custom": Squared.apply, "elu": F.elu,
}  # fmt: skip
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm, "rms": RmsNorm, "torch rms": nn.RMSNorm, "none": lambda width: nn.Identity(),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    width: int
    heads: int
    key_heads: int
    hidden: int
    activation: str
    norm: str
    gated: bool
    attention: str
    causal: bool
    dropout: float
    experts: int
    routing: str
    mixer: str


def random_shape(draw: random.Random, causal: bool, width: int | None = None) -> Shape:
    width = width or draw.choice([96, 128, 160, 192, 256])
    heads = draw.choice([2, 4, 8])
    return Shape(
        width, heads, heads // draw.choice([1, 1, 2]), draw.choice([2, 3, 4]) * width, draw.choice([*ACTIVATIONS]),
        draw.choice([*NORMS]), draw.random() < 0.4, draw.choice(["sdpa", "sdpa", "by hand"]), causal,
        draw.choice([0.0, 0.0, 0.1]), draw.choice([0, 0, 0, 2, 4]), draw.choice(["dense", "index"]),
        draw.choice(["attention"] * 4 + ["convolution", "recurrent"]),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, shape: Shape, cross: bool = False):
        super().__init__()
        self.shape, size = shape, shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.keys = nn.Linear(shape.width, 2 * size * shape.key_heads, bias=False)
        self.out = nn.Linear(shape.width, shape.width)
        self.causal = shape.causal and not cross

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        shape, source = self.shape, x if other is None else other
        query = self.query(x).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
        key, value = self.keys(source).unflatten(-1, (2, shape.key_heads, -1)).permute(2, 0, 3, 1, 4)
        if shape.key_heads != shape.heads:
            times = shape.heads // shape.key_heads
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        if shape.attention == "sdpa":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
            mixed = F.dropout(scores.softmax(-1), shape.dropout, self.training) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.up, self.down = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden) if shape.gated else None
        self.activation, self.dropout = ACTIVATIONS[shape.activation], shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return F.dropout(self.down(hidden), self.dropout, self.training)


class Experts(nn.Module):
    """Mixture of experts, routed by indices with value-dependent shapes, or computed densely and weighted."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.experts = nn.ModuleList(Mlp(shape) for _ in range(shape.experts))
        self.router, self.routing = nn.Linear(shape.width, shape.experts), shape.routing

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights = self.router(flat).softmax(-1)
        if self.routing == "dense":
            mixed = sum(weights[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))
            return mixed.view_as(x)  # type: ignore[union-attr]
        most, chosen = weights.max(-1)
        result = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            result = result.index_add(0, rows, (expert(flat[rows]) * most[rows, None]).to(result.dtype))
        return result.view_as(x)


class Mixer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.kind = shape.mixer
        if self.kind == "convolution":
            groups = shape.width if shape.gated else 1
            self.inner: nn.Module = nn.Conv1d(shape.width, shape.width, 5, padding=2, groups=groups)
        else:
            self.inner = nn.GRU(shape.width, shape.width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            return self.inner(x.transpose(1, 2)).transpose(1, 2)
        return self.inner(x)[0]


class Block(nn.Module):
    def __init__(self, shape: Shape, cross: bool = False):
        super().__init__()
        self.norms = nn.ModuleList(NORMS[shape.norm](shape.width) for _ in range(3 if cross else 2))
        self.mix = Attention(shape) if shape.mixer == "attention" else Mixer(shape)
        self.cross = Attention(shape, cross=True) if cross else None
        self.mlp = Experts(shape) if shape.experts else Mlp(shape)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.mix(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), other)
        return x + self.mlp(self.norms[1](x))


class Stack(nn.Module):
    """Stack of blocks; optionally all share one block's weights, or run under torch's checkpoint."""

    def __init__(self, shape: Shape, depth: int, shared: bool, recomputed: bool, cross: bool = False):
        super().__init__()
        first = Block(shape, cross)
        self.blocks = nn.ModuleList(first if shared else (Block(shape, cross) if i else first) for i in range(depth))
        self.recomputed = recomputed

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, other, use_reentrant=False) if self.recomputed else block(x, other)
        return x


class TextModel(nn.Module):
    def __init__(self, shape: Shape, stack: Stack, vocabulary: int, length: int, tied: bool, outputs: int = 0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, shape.width), nn.Embedding(length, shape.width)
        self.stack, self.pooled = stack, bool(outputs)
        self.head = nn.Linear(shape.width, outputs or vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("table", torch.arange(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(self.table[: tokens.shape[1]])
        x = self.stack(x)
        return self.head(x.mean(1) if self.pooled else x)


class EncoderDecoder(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: Stack, width: int, vocabulary: int):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder, self.decoder, self.head = encoder, decoder, nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(self.target(target), self.encoder(self.source(source))))


# Losses of all forms


def token_mean(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def token_mean_float(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def token_parts(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses, (tokens[:, 1:] != 0).float()


def token_examples(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def smooth_classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def squares(model: nn.Module, images: Tensor) -> Tensor:
    return (model(images) - images).square().flatten(1).mean(1)


def huber(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch[0])[:, :1], batch[1].float()[:, None].to(batch[0].dtype))


TOKEN_LOSSES = (token_mean, token_mean_float, token_parts, token_examples)

Family = tuple[str, Callable[[], nn.Module], Any, Loss | None]


def decoder(draw: random.Random) -> Family:
    shape, depth = random_shape(draw, True), draw.randint(2, 5)
    vocabulary, length = draw.choice([512, 2048, 8192]), draw.choice([64, 128, 192])
    shared, recomputed, tied = draw.random() < 0.2, draw.random() < 0.25, draw.random() < 0.5

    def build() -> nn.Module:
        return TextModel(shape, Stack(shape, depth, shared, recomputed), vocabulary, length, tied)

    tokens = torch.randint(vocabulary, (draw.choice([4, 8, 12]), length + 1))
    loss = draw.choice(TOKEN_LOSSES)
    extra = f"{shape}, depth {depth}{', shared' * shared}{', recomputed' * recomputed}{', tied' * tied}"
    return f"decoder of {extra}, {loss.__name__} of {tuple(tokens.shape)} by {vocabulary}", build, tokens, loss


def encoder(draw: random.Random) -> Family:
    length, vocabulary, count = draw.choice([48, 96, 160]), draw.choice([512, 4096]), draw.choice([8, 16])
    batch = torch.randint(vocabulary, (count, length)), torch.randint(7, (count,))
    loss = draw.choice([classes, smooth_classes])
    if draw.random() < 0.5:
        width, depth, kind = draw.choice([128, 192]), draw.randint(2, 4), draw.choice(["relu", "gelu"])
        first, dropout = draw.random() < 0.5, draw.choice([0.0, 0.1])

        def of_torch() -> nn.Module:
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, kind, batch_first=True, norm_first=first)
            stack = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
            pooled = nn.Sequential(nn.Flatten(), nn.Linear(length * width, 7))
            return nn.Sequential(nn.Embedding(vocabulary, width), stack, pooled)

        return f"torch's encoder {width} x {depth}, dropout {dropout}", of_torch, batch, loss
    shape, depth, recomputed = random_shape(draw, False), draw.randint(2, 4), draw.random() < 0.2

    def build() -> nn.Module:
        return TextModel(shape, Stack(shape, depth, False, recomputed), vocabulary, length, False, 7)

    return f"encoder of {shape}, depth {depth}{', recomputed' * recomputed}", build, batch, loss


def encoder_decoder(draw: random.Random) -> Family:
    causal, vocabulary = random_shape(draw, True), draw.choice([512, 3000])
    shape = random_shape(draw, False, causal.width)
    depth, recomputed = draw.randint(1, 3), draw.random() < 0.2

    def build() -> nn.Module:
        stacks = Stack(shape, depth, False, recomputed), Stack(causal, depth, False, recomputed, cross=True)
        return EncoderDecoder(*stacks, shape.width, vocabulary)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["source"], batch["target"])
        return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())

    count = draw.choice([4, 8])
    batch = {name: torch.randint(vocabulary, (count, draw.choice([48, 96]))) for name in ("source", "target")}
    return f"encoder-decoder of {shape} and {causal}, depth {depth}", build, batch, loss


def vision_transformer(draw: random.Random) -> Family:
    shape, side, patch = random_shape(draw, False), draw.choice([64, 96]), draw.choice([8, 16])
    depth, count = draw.randint(2, 4), draw.choice([8, 12])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, shape.width, patch, stride=patch)
            self.positions = nn.Parameter(torch.zeros((side // patch) ** 2, shape.width))
            self.stack, self.head = Stack(shape, depth, False, False), nn.Linear(shape.width, 100)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
            return self.head(self.stack(x).mean(1))

    batch = torch.randn(count, 3, side, side), torch.randint(100, (count,))
    return f"vision transformer of {shape}, side {side}", Model, batch, draw.choice([classes, huber])


def convnet(draw: random.Random) -> Family:
    width, depth, side = draw.choice([12, 16, 24, 32]), draw.randint(2, 4), draw.choice([32, 48, 64])
    norm = draw.choice(["batch", "group", "none", "instance"])
    kernel, depthwise, residual = draw.choice([3, 3, 5, 7]), draw.random() < 0.3, draw.random() < 0.5
    kind, pool, last = draw.choice([nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU]), draw.random() < 0.5, draw.random() < 0.2
    inplace = kind is nn.ReLU and draw.random() < 0.5

    class ConvBlock(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.first = nn.Conv2d(width, width, kernel, padding="same", groups=width if depthwise else 1, bias=False)
            norms = {"batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d, "none": nn.Identity}
            self.norm = nn.GroupNorm(4, width) if norm == "group" else norms[norm](width)
            self.activation = nn.ReLU(inplace=True) if inplace else kind()
            self.second = nn.Conv2d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.activation(self.norm(self.first(x))))
            return x + y if residual else y

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for level in range(depth):
            layers += [ConvBlock(width * 2**level), ConvBlock(width * 2**level)]
            down = nn.MaxPool2d(2) if pool else nn.AvgPool2d(2)
            layers += [nn.Conv2d(width * 2**level, width * 2 ** (level + 1), 3, padding=1), down]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 2**depth, 10))
        return model.to(memory_format=torch.channels_last) if last else model

    count = draw.choice([4, 8, 20])
    images = torch.randn(count, 3, side, side)
    batch = images.to(memory_format=torch.channels_last) if last else images, torch.randint(10, (count,))
    words = f"{width} x {depth}, kernel {kernel}, {norm}, side {side}, batch {count}{', channels last' * last}"
    return f"convnet {words}{', depthwise' * depthwise}", build, batch, draw.choice([classes, smooth_classes])


def autoencoder(draw: random.Random) -> Family:
    width, side, depth = draw.choice([16, 24]), draw.choice([32, 64]), draw.randint(2, 3)
    upsampled, skips = draw.random() < 0.5, draw.random() < 0.5

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
            sizes = [width * 2**level for level in range(depth + 1)]
            self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(sizes))
            self.up = nn.ModuleList(self.upsample(b, a) for a, b in pairwise(sizes))

        def upsample(self, a: int, b: int) -> nn.Module:
            if upsampled:
                return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, padding=1))
            return nn.ConvTranspose2d(a, b, 4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x, skipped = self.first(x), []
            for layer in self.down:
                skipped.append(x)
                x = F.silu(layer(x))
            for layer in reversed(self.up):
                x = F.silu(layer(x))
                x = x + skipped.pop() if skips else x
            return self.last(x)

    images = torch.randn(draw.choice([6, 16]), 3, side, side)
    return f"autoencoder {width} x {depth}, side {side}{', upsampled' * upsampled}", Model, images, squares


def recurrent(draw: random.Random) -> Family:
    kind, width, depth = draw.choice([nn.LSTM, nn.GRU, nn.RNN]), draw.choice([96, 128, 192]), draw.randint(1, 3)
    vocabulary, tied, both = draw.choice([512, 3000]), draw.random() < 0.5, draw.random() < 0.3
    dropout = draw.choice([0.0, 0.2]) if depth > 1 else 0.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            size = width // 2 if both else width
            self.cells = kind(width, size, depth, batch_first=True, dropout=dropout, bidirectional=both)
            self.head = nn.Linear(width, vocabulary)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.cells(self.tokens(tokens))[0])

    tokens = torch.randint(vocabulary, (draw.choice([8, 16]), draw.choice([32, 64]) + 1))
    return f"{kind.__name__} {width} x {depth}, both {both}", Model, tokens, draw.choice(TOKEN_LOSSES)


def waveform(draw: random.Random) -> Family:
    """Return a model with strided convolutions of a waveform before a transformer, as in speech models."""
    shape, samples, count = random_shape(draw, False), draw.choice([4000, 8000]), draw.choice([4, 8])
    depth = draw.randint(1, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            strides = [(10, 5), (4, 4), (3, 2), (3, 2)]
            sizes = [1, *[shape.width] * len(strides)]
            self.front = nn.ModuleList(
                nn.Conv1d(sizes[i], sizes[i + 1], kernel, stride) for i, (kernel, stride) in enumerate(strides)
            )
            self.stack, self.head = Stack(shape, depth, False, False), nn.Linear(shape.width, 30)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            for layer in self.front:
                x = F.gelu(layer(x))
            return self.head(self.stack(x.transpose(1, 2)).mean(1))

    batch = torch.randn(count, samples), torch.randint(30, (count,))
    return f"waveform model of {shape}", Model, batch, classes


HAND_WRITTEN: list[Callable[[random.Random], Family]] = [
    decoder, decoder, encoder, encoder_decoder, vision_transformer, convnet, convnet, autoencoder, recurrent, waveform,
]  # fmt: skip


# Models of libraries


def _text_sizes(draw: random.Random) -> dict[str, Any]:
    width = draw.choice([96, 128, 192])
    return {
        "hidden_size": width, "intermediate_size": draw.choice([2, 3, 4]) * width,
        "num_attention_heads": 4, "num_hidden_layers": draw.randint(2, 4),
        "max_position_embeddings": 256, "vocab_size": draw.choice([1024, 5000]),
    }  # fmt: skip


HALF: dict[str, Any] = {"num_key_value_heads": 2}
WIDE: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32}
ALL: dict[str, Any] = {"num_key_value_heads": 4}
ROUTED: dict[str, Any] = {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": HALF, "qwen2": HALF, "qwen3": WIDE, "mistral": WIDE, "mixtral": {**HALF, "num_local_experts": 4},
    "olmo2": ALL, "gpt_neox": {}, "gpt2": {}, "opt": {}, "bloom": {}, "falcon": {}, "phi": ALL, "gemma2": WIDE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2}, "gemma3_text": WIDE, "stablelm": ALL,
    "cohere": ALL, "granite": ALL, "starcoder2": HALF, "phi3": {**ALL, "pad_token_id": 0}, "gptj": {"rotary_dim": 16},
    "qwen2_moe": {**ROUTED, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}, "olmoe": ROUTED,
    "mamba": {"state_size": 8}, "glm": {**WIDE, "pad_token_id": 0}, "smollm3": {**HALF, "pad_token_id": 0},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "bert": {}, "roberta": {}, "albert": {"embedding_size": 64}, "distilbert": {}, "electra": {"embedding_size": 64},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "modernbert": {"pad_token_id": 0},
    "mpnet": {}, "esm": {"pad_token_id": 1, "mask_token_id": 2}, "fnet": {}, "convbert": {"embedding_size": 96},
    "squeezebert": {"embedding_size": 96},
}  # fmt: skip
SEQ2SEQ = ("t5", "bart", "marian", "pegasus", "m2m_100", "mbart", "umt5", "switch_transformers", "blenderbot")
CONVNEXT: dict[str, Any] = {"depths": [1, 1, 2, 1], "hidden_sizes": [24, 48, 64, 96]}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": {}, "deit": {}, "beit": {}, "dinov2": {}, "convnext": CONVNEXT, "convnextv2": CONVNEXT,
    "resnet": {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128], "embedding_size": 24},
    "regnet": {"depths": [1, 1, 2, 1], "hidden_sizes": [32, 64, 96, 128], "embedding_size": 24, "groups_width": 16},
    "swin": {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 96], "num_attention_heads": [1, 2, 4, 8]},
    "poolformer": {"depths": [1, 1, 2, 1], "hidden_sizes": [24, 48, 64, 96]}, "mobilenet_v2": {"depth_multiplier": 0.5},
    "mobilenet_v1": {"depth_multiplier": 0.5}, "vit_msn": {}, "siglip": {},
    "pvt": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 96], "num_attention_heads": [1, 2, 4, 8]},
}  # fmt: skip
SPEECH = ("wav2vec2", "hubert", "sew", "wavlm", "unispeech-sat", "whisper", "audio-spectrogram-transformer")


TOKENS = ("pad_token_id", "decoder_start_token_id", "eos_token_id", "bos_token_id")


def _config(kind: str, **values: Any) -> Any:
    """Return the config of a kind, with those of these values that it supports."""
    import transformers

    usual = transformers.CONFIG_MAPPING[kind]()
    known = {name: value for name, value in values.items() if hasattr(usual, name) or name in TOKENS}
    return transformers.CONFIG_MAPPING[kind](**known)


def transformers_step(draw: random.Random) -> Family:
    """Return a model of transformers that computes its loss from labels."""
    import transformers

    task = draw.choice(["causal", "causal", "masked", "seq2seq", "images", "images", "speech"])
    sizes, count, length = _text_sizes(draw), draw.choice([4, 8]), draw.choice([64, 128])
    tokens = torch.randint(3, sizes["vocab_size"], (count, length))
    auto: Any
    if task in ("causal", "masked"):
        auto = transformers.AutoModelForCausalLM if task == "causal" else transformers.AutoModelForMaskedLM
        kind, own = draw.choice([*(CAUSAL if task == "causal" else MASKED).items()])
        stages = transformers.CONFIG_MAPPING[kind].attribute_map if own else {}  # sizes that `own` sets
        config = _config(kind, **{name: size for name, size in sizes.items() if name not in stages} | own)
        batch: dict[str, Tensor] = {"input_ids": tokens, "labels": tokens}
        if draw.random() < 0.4 and kind not in ("mamba", "fnet"):
            mask = torch.ones_like(tokens)
            mask[0, length // 2 :] = 0
            batch["attention_mask"] = mask
    elif task == "seq2seq":
        kind, width, depth = draw.choice(SEQ2SEQ), sizes["hidden_size"], draw.randint(1, 3)
        config = _config(
            kind, vocab_size=sizes["vocab_size"], d_model=width, d_ff=2 * width, d_kv=32, num_layers=depth,
            num_heads=4, encoder_layers=depth, decoder_layers=depth, encoder_attention_heads=4, num_experts=4,
            decoder_attention_heads=4, encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width, pad_token_id=0,
            decoder_start_token_id=0, max_position_embeddings=256, eos_token_id=1, bos_token_id=2,
        )  # fmt: skip
        auto, batch = (
            transformers.AutoModelForSeq2SeqLM,
            {"input_ids": tokens, "labels": tokens[:, : length // 2].contiguous()},
        )
    elif task == "images":
        kind, own = draw.choice([*IMAGES.items()])
        side = draw.choice([64, 96])
        sizes = {
            "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": side, "patch_size": 4 if kind == "swin" else 8, "num_labels": 50,
        }  # fmt: skip
        config = _config(kind, **sizes | own)
        if kind == "siglip":
            config.vision_config = type(config.vision_config)(
                hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=side,
                patch_size=8,
            )  # fmt: skip
        if kind.startswith("pvt"):
            config.patch_sizes = [4, 2, 2, 2]
        auto = transformers.AutoModelForImageClassification
        batch = {"pixel_values": torch.randn(count, 3, side, side), "labels": torch.randint(50, (count,))}
    else:
        kind = draw.choice(SPEECH)
        width = 96
        config = _config(
            kind, hidden_size=width, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            conv_dim=[64] * (13 if kind.startswith("sew") else 7), d_model=width, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=64 if kind != "whisper" else 40, max_length=128,
            max_source_positions=100, num_conv_pos_embedding_groups=8, num_labels=12, squeeze_factor=2,
            apply_spec_augment=False, mask_time_prob=0.0, pad_token_id=0, vocab_size=1000, classifier_proj_size=64,
        )  # fmt: skip
        auto = transformers.AutoModelForAudioClassification
        if kind == "whisper":
            values = {"input_features": torch.randn(count, 40, 200)}
        elif kind == "audio-spectrogram-transformer":
            values = {"input_values": torch.randn(count, 128, 64)}
        else:
            values = {"input_values": torch.randn(count, 8000)}
        batch = values | {"labels": torch.randint(12, (count,))}
    attention = draw.choice(["sdpa", "eager"])

    def build() -> nn.Module:
        try:
            return auto.from_config(config, attn_implementation=attention)
        except ValueError:  # it supports one implementation only
            return auto.from_config(config, attn_implementation="eager")

    words = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())
    return f"transformers {kind} ({attention}), {words}", build, batch, None


TIMM = (
    "resnet10t", "resnet18", "resnet26", "mobilenetv3_small_050", "efficientnet_lite0", "regnetx_002", "regnety_002",
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "convnext_atto", "convnextv2_atto", "mixer_s32_224",
    "xcit_nano_12_p16_224", "poolformer_s12", "edgenext_xx_small", "mobilevit_xxs", "ghostnet_050", "densenet121",
    "cait_xxs24_224", "swin_tiny_patch4_window7_224", "pit_ti_224", "levit_128s", "fasternet_t0", "repvit_m0_9",
    "lcnet_050", "tinynet_e", "nf_regnet_b0", "eca_nfnet_l0", "gmlp_ti16_224", "resmlp_12_224",
    "mambaout_femto", "starnet_s1", "res2net50_14w_8s", "coat_lite_tiny", "pvt_v2_b0", "twins_svt_small",
    "sequencer2d_s", "vgg11_bn", "inception_next_tiny", "focalnet_tiny_srf", "tnt_s_patch16_224",
    "maxvit_rmlp_pico_rw_256",
)  # fmt: skip


def timm_step(draw: random.Random) -> Family:
    timm: Any = importlib.import_module("timm")

    name, count = draw.choice(TIMM), draw.choice([2, 4])
    side = draw.choice([64, 96, 128])
    with torch.device("meta"):
        try:
            timm.create_model(name, num_classes=20, img_size=side)
            settings = {"img_size": side}
        except TypeError:
            settings = {}
        except Exception:  # window sizes that do not divide the image
            settings, side = {}, 224
    fixed = ("_224", "levit", "coat", "focalnet", "sequencer")
    if not settings and any(word in name for word in fixed):
        side = 224
    if "256" in name:
        side = 256

    def build() -> nn.Module:
        return timm.create_model(name, num_classes=20, **settings)

    batch = torch.randn(count, 3, side, side), torch.randint(20, (count,))
    return f"timm {name}, side {side}, batch {count}", build, batch, draw.choice([classes, smooth_classes])
