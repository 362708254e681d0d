"""What a family of published models is: how it is put together, and how its Hugging Face folders spell it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.setting_bounds import LARGEST_INTEGER
from thrifty.models.attention_layers import Attention, AttentionCore, CrossAttention, full_attention
from thrifty.models.contrastive_model import ContrastiveModel, QuickGELU
from thrifty.models.masked_autoencoder import MaskedAutoencoder
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import Encoder, EncoderDecoder, Task, Transformer
from thrifty.models.transformer_blocks import FeedForward, TransformerBlock
from thrifty.models.vision_transformer import VisionTransformer

Config = Mapping[str, Any]
Fields = Mapping[str, tuple[str, float | str | None]]
"""For a field of `ModelConfig` its key in config.json, and what is meant where that is missing (None: it may not be),
which tells whole numbers, others and names of activations apart."""
Model = Transformer | Encoder | EncoderDecoder | VisionTransformer | ContrastiveModel | MaskedAutoencoder

ACTIVATION: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "quick_gelu": QuickGELU,
}
SPELLED = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
"""Our names of activations in the spelling of transformers."""
Kinds = Sequence[Literal["weight", "bias"]]
KINDS: Kinds = ("weight", "bias")
READ = {theirs: ours for ours, theirs in SPELLED.items()} | {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


@dataclass(frozen=True)
class ParameterPacking:
    """Our parameter is their tensors stacked along its rows (`rows` of each; none for a single tensor)."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    as_row: bool = False
    """Theirs is a matrix of one row, ours a vector."""
    ahead: int = 0
    """So many dimensions of size 1 stand in front of ours that theirs has not."""

    def pack(self, tensors: list[Tensor]) -> Tensor:
        parts = [tensor.T if self.transposed else tensor for tensor in tensors]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (packed[0] if self.as_row else packed[(None,) * self.ahead]).contiguous()

    def unpack(self, tensor: Tensor) -> dict[str, Tensor]:
        whole = tensor[None] if self.as_row else tensor[(0,) * self.ahead]
        parts = whole.split(self.rows) if self.rows else [whole]
        parts = [(part.T if self.transposed else part).contiguous() for part in parts]
        return dict(zip(self.theirs, parts, strict=True))

    @classmethod
    def renamed(
        cls, names: Mapping[str, str], ours: str = "", theirs: str = "", kinds: Kinds = KINDS
    ) -> Iterator[Self]:
        """Modules whose parameters differ in their names alone, after these prefixes."""
        for mine, yours in names.items():
            for kind in kinds:
                yield cls(f"{ours}{mine}.{kind}", (f"{theirs}{yours}.{kind}",))

    @classmethod
    def stacked(cls, ours: str, theirs: Sequence[str], rows: tuple[int, ...], kinds: Kinds = KINDS) -> Iterator[Self]:
        """A module whose parameters are those of several of theirs, so many rows of each."""
        for kind in kinds:
            yield cls(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), rows=rows)


class ModelFamily:
    """One architecture of transformers. `read` are the settings that `shape` looks at, `only` those with values it can
    live with, `ignored` those that change nothing here."""

    style: ClassVar[str]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    task: ClassVar[Task]
    bounded: ClassVar[bool] = True
    """Whether the model takes no more tokens than its length."""

    free_heads: ClassVar[bool] = False
    """Whether config.json can say how wide a head is, so that heads together need not be as wide as the model."""
    free_hidden: ClassVar[bool] = True
    """Whether config.json can say how wide feed-forward networks are inside."""

    sections: ClassVar[tuple[str, ...]] = ()
    """Parts of config.json that hold settings like its own, one for each tower."""
    fields: ClassVar[Fields] = {}
    """Settings that are read and written unchanged, in the order of config.json."""
    read: ClassVar[frozenset[str]] = frozenset()
    """Which other keys are understood."""
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    body: ClassVar[str] = ""
    """What most names of tensors begin with, left out in some older files."""
    token: ClassVar[str]
    """Their name of the token embedding."""
    head: ClassVar[str] = "lm_head.weight"
    """Their name of the head, which holds the token embedding where it is tied; "" for a model without one."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """How names of tensors begin in some files, and how they begin in the table."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names under which some files repeat a tensor."""
    left_out: ClassVar[str] = r"(?!)"
    """Pattern of tensors that are no part of the model: masks and tables that follow from the architecture, and heads
    for other tasks."""

    def assemble(self, shape: ModelConfig) -> Model:
        """The model, its values not yet initialised; a tied head is tied by the caller."""
        raise NotImplementedError

    def layer_norm_block(
        self,
        shape: ModelConfig,
        core: AttentionCore = full_attention,
        kind: type[TransformerBlock] = TransformerBlock,
        activation: str = "",
        cross: bool = False,
    ) -> TransformerBlock:
        """Return a block of the first Transformer: LayerNorms, biases in all layers, a network without a gate.

        Pre-norm by default, `kind` says another; with attention over an encoder's memory where it is `cross`.
        """

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(shape.width, eps=shape.norm_eps)

        attention = Attention(shape.width, shape.heads, bias=True, core=core)
        mlp = FeedForward(shape.width, shape.hidden, ACTIVATION[activation or shape.activation]())
        over_memory = (norm(), CrossAttention(shape.width, shape.heads, bias=True)) if cross else ()
        return kind(norm(), attention, norm(), mlp, *over_memory)

    def shape(self, config: Config) -> ModelConfig:
        """Raises RefusedError for what the model does not compute, UsageError for what is missing or malformed."""
        raise NotImplementedError

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        """The settings of config.json that are the family's own. Raises RefusedError for what it has no word for."""
        raise NotImplementedError

    def read_fields(self, config: Config, fields: Fields | None = None) -> dict[str, Any]:
        return {name: _field(config, name, *pair) for name, pair in (fields or self.fields).items()}

    def written_fields(self, shape: ModelConfig, fields: Fields | None = None) -> dict[str, Any]:
        values = {key: getattr(shape, name) for name, (key, _) in (fields or self.fields).items()}
        return {key: SPELLED[value] if isinstance(value, str) else value for key, value in values.items()}

    def with_special(self, config: dict[str, Any], special: Mapping[str, int | None]) -> dict[str, Any]:
        """config.json with the numbers of special tokens, where they belong. Raises RefusedError where one is missing
        that the model cannot be used without."""
        return config | special

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        """Which of their tensors make up which of ours, a free head apart."""
        raise NotImplementedError


def _field(config: Config, name: str, key: str, default: Any) -> Any:
    if isinstance(default, str):
        return READ[config.get(key, default)]
    if name in ("image", "patch"):
        return side(config, key, default)
    return number(config, key, float if isinstance(default, float) else int, default)


def number(config: Config, key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
    """A positive number of config.json."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"config.json has no {key}", fix=f"add {key}, or fetch the model folder again")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST_INTEGER
    if not is_number or kind(value) != value:
        wanted = "whole number" if kind is int else "number"
        raise UsageError(f"config.json: {key} is {value!r:.80}", fix=f"it must be a positive {wanted}")
    return kind(value)


def table(config: Config, key: str) -> Config:
    """A table of config.json, which may be missing."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"config.json: {key} is {value!r:.80}", fix="it must be a JSON object")
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"config.json: {key} is {value!r}", fix="it must be true or false")
    return value


def side(config: Config, key: str, default: int) -> int:
    """A height and width of config.json, which may be given as one number or as two equal ones."""
    value = config.get(key)
    if isinstance(value, list):
        if not value or value.count(value[0]) != len(value):
            raise RefusedError(f"config.json: {key} is {value!r:.80}, and images and patches are square here")
        config = {**config, key: value[0]}
    pixels = number(config, key, int, default)
    if pixels > 1 << 16:
        raise UsageError(f"config.json: {key} is {pixels}", fix="give a number of pixels")
    return pixels
