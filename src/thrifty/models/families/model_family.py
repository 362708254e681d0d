"""The interface of a family of published models: construction, and conversion of its Hugging Face folders."""

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
"""Key in config.json and default (None: required) for each field of `ModelConfig`. The default's type distinguishes
integers, floats and names of activations."""
Model = Transformer | Encoder | EncoderDecoder | VisionTransformer | ContrastiveModel | MaskedAutoencoder

ACTIVATION: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "quick_gelu": QuickGELU,
}
SPELLED = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
"""Names of activations in Thrifty, mapped to names in transformers."""
Kinds = Sequence[Literal["weight", "bias"]]
KINDS: Kinds = ("weight", "bias")
READ = {theirs: ours for ours, theirs in SPELLED.items()} | {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


@dataclass(frozen=True)
class ParameterPacking:
    """Conversion rule for one parameter. `ours` is the concatenation of transformers' tensors `theirs` along the rows;
    `rows` are their row counts."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    as_row: bool = False
    """True if transformers' tensor is a matrix of one row, and Thrifty's tensor is a vector."""
    ahead: int = 0
    """Number of additional leading dims of size 1 in Thrifty's tensor."""

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
        """Yield the rules for modules whose parameters differ only in name; `ours` and `theirs` are name prefixes."""
        for our_name, their_name in names.items():
            for kind in kinds:
                yield cls(f"{ours}{our_name}.{kind}", (f"{theirs}{their_name}.{kind}",))

    @classmethod
    def stacked(cls, ours: str, theirs: Sequence[str], rows: tuple[int, ...], kinds: Kinds = KINDS) -> Iterator[Self]:
        """Yield the rules for a module that fuses several modules of transformers; `rows` are their row counts."""
        for kind in kinds:
            yield cls(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), rows=rows)


class ModelFamily:
    """One architecture of transformers. `read` names the settings that `shape` uses. `only` maps settings to their
    supported values. `ignored` names settings without effect in Thrifty."""

    style: ClassVar[str]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    task: ClassVar[Task]
    bounded: ClassVar[bool] = True
    """True if the model cannot process more tokens than its length."""

    free_heads: ClassVar[bool] = False
    """True if config.json can set the head width, so that heads · head width may differ from the model's width."""
    free_hidden: ClassVar[bool] = True
    """True if config.json can set the inner width of feed-forward networks."""

    sections: ClassVar[tuple[str, ...]] = ()
    """Names of nested tables in config.json, one table per tower."""
    fields: ClassVar[Fields] = {}
    """Settings that are converted without change, in the order of config.json."""
    read: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json that `shape` reads in addition to `fields`."""
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    body: ClassVar[str] = ""
    """Prefix of most tensor names; some older files lack the prefix."""
    token: ClassVar[str]
    """Name of the token embedding in transformers."""
    head: ClassVar[str] = "lm_head.weight"
    """Name of an untied head in transformers; "" for a model without a head."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Prefixes of tensor names in some files, mapped to the prefixes in `table`."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names under which some files repeat a tensor."""
    left_out: ClassVar[str] = r"(?!)"
    """Pattern of tensors that are not part of the model: constant masks and tables, and heads for other tasks."""

    def assemble(self, shape: ModelConfig) -> Model:
        """Return the uninitialized model; the caller ties its head."""
        raise NotImplementedError

    def layer_norm_block(
        self,
        shape: ModelConfig,
        core: AttentionCore = full_attention,
        kind: type[TransformerBlock] = TransformerBlock,
        activation: str = "",
        cross: bool = False,
    ) -> TransformerBlock:
        """Return a block with LayerNorms, biases in all layers and an ungated feed-forward network. The block is
        pre-norm unless `kind` is another class. `cross` adds cross-attention to encoder outputs."""

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(shape.width, eps=shape.norm_eps)

        attention = Attention(shape.width, shape.heads, bias=True, core=core)
        mlp = FeedForward(shape.width, shape.hidden, ACTIVATION[activation or shape.activation]())
        over_memory = (norm(), CrossAttention(shape.width, shape.heads, bias=True)) if cross else ()
        return kind(norm(), attention, norm(), mlp, *over_memory)

    def shape(self, config: Config) -> ModelConfig:
        """Return the `ModelConfig` of a config.json. Raise RefusedError for unsupported settings. Raise UsageError for
        missing or malformed settings."""
        raise NotImplementedError

    def config(self, shape: ModelConfig) -> dict[str, Any]:
        """Return the family's own settings in config.json. Raise RefusedError for a model that config.json cannot
        describe."""
        raise NotImplementedError

    def read_fields(self, config: Config, fields: Fields | None = None) -> dict[str, Any]:
        return {name: _field(config, name, *pair) for name, pair in (fields or self.fields).items()}

    def written_fields(self, shape: ModelConfig, fields: Fields | None = None) -> dict[str, Any]:
        values = {key: getattr(shape, name) for name, (key, _) in (fields or self.fields).items()}
        return {key: SPELLED[value] if isinstance(value, str) else value for key, value in values.items()}

    def with_special(self, config: dict[str, Any], special: Mapping[str, int | None]) -> dict[str, Any]:
        """Return config.json with the ids of special tokens. Raise RefusedError if a required token is missing."""
        return config | special

    def table(self, shape: ModelConfig) -> Iterator[ParameterPacking]:
        """Yield the packing of each parameter except an untied head."""
        raise NotImplementedError


def _field(config: Config, name: str, key: str, default: Any) -> Any:
    if isinstance(default, str):
        return READ[config.get(key, default)]
    if name in ("image", "patch"):
        return side(config, key, default)
    return number(config, key, float if isinstance(default, float) else int, default)


def number(config: Config, key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
    """Return a positive number of config.json. Raise UsageError for any other value."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"config.json has no {key}", fix=f"add {key}; or fetch the model folder again")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST_INTEGER
    if not is_number or kind(value) != value:
        wanted = "whole number" if kind is int else "number"
        raise UsageError(f"config.json: {key} is {value!r:.80}", fix=f"set {key} to a positive {wanted}")
    return kind(value)


def table(config: Config, key: str) -> Config:
    """Return a nested table of config.json; {} if the table is missing."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"config.json: {key} is {value!r:.80}", fix=f"make {key} a JSON object")
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"config.json: {key} is {value!r}", fix=f"set {key} to true or false")
    return value


def side(config: Config, key: str, default: int) -> int:
    """Return a side in pixels, which config.json stores as one number or as a list of equal numbers."""
    value = config.get(key)
    if isinstance(value, list):
        if not value or value.count(value[0]) != len(value):
            raise RefusedError(
                f"config.json: {key} is {value!r:.80}, but only square images and patches are supported",
                fix="pass the folder of a model with square images and patches",
            )
        config = {**config, key: value[0]}
    pixels = number(config, key, int, default)
    if pixels > 1 << 16:
        raise UsageError(f"config.json: {key} is {pixels}", fix=f"set {key} to a number of pixels up to {1 << 16}")
    return pixels
