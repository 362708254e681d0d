"""The sizes and choices that define a model."""

from dataclasses import dataclass, field, fields
from typing import Literal

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.models.scaled_rotary import Llama3Scaling

Style = Literal["llama", "gpt", "gpt1", "bert", "t5", "marian", "vit", "clip", "mae"]

_SIZES = (
    "depth", "width", "heads", "kv_heads", "hidden", "vocabulary", "length", "token_types", "decoder_depth",
    "fixed_head_width", "image", "patch", "channels", "text_depth", "text_width", "text_heads", "text_hidden", "space",
    "decoder_width", "decoder_heads", "decoder_hidden",
)  # fmt: skip
_LARGEST = 1 << 24
_DEEPEST = 10_000
_PLAIN = ("gelu", "gelu_tanh", "relu", "silu")

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "llama": ("gated-silu",),
    "gpt": ("gelu_tanh",),
    "gpt1": ("gelu_tanh",),
    "bert": _PLAIN,
    "t5": ("relu", "gelu", "gelu_tanh", "silu", "gated-relu", "gated-gelu_tanh", "gated-silu"),
    "marian": ("silu", "gelu", "gelu_tanh", "relu"),
    "vit": _PLAIN,
    "clip": ("quick_gelu", *_PLAIN),
    "mae": _PLAIN,
}
"""Activations of the feed-forward network that each style supports; the first is its default."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model: all settings that define its parameters and computation. Raise UsageError for incompatible
    sizes, and for a field of another style (the metadata `of` lists the styles of a field)."""

    style: Style
    depth: int
    """Number of blocks; in an encoder-decoder, number of encoder blocks."""
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Inner width of the feed-forward network."""
    vocabulary: int
    """Vocabulary size in tokens. In a vit: number of labels. In a mae: number of values per patch."""
    length: int
    """Context length in tokens: the number of positions in gpt, bert, marian and clip, and the trained context in llama
    and t5. In a vit and a mae the passed value is ignored; image and patches determine the length."""
    tied: bool
    norm_eps: float = 1e-5
    activation: str = ""
    """Activation of the feed-forward network, see `ACTIVATIONS`; by default the style's first activation."""
    rope_base: float = field(default=10_000.0, metadata={"of": "llama"})
    rope_scaling: Llama3Scaling | None = field(default=None, metadata={"of": "llama"})
    token_types: int = field(default=2, metadata={"of": "bert"})
    decoder_depth: int | None = field(default=None, metadata={"of": "t5 marian mae"})
    """Number of decoder blocks; None if it equals the number of encoder blocks."""
    decoder_width: int = field(default=512, metadata={"of": "mae"})
    decoder_heads: int = field(default=16, metadata={"of": "mae"})
    decoder_hidden: int = field(default=2048, metadata={"of": "mae"})
    fixed_head_width: int | None = field(default=None, metadata={"of": "t5 llama"})
    """Head width, if heads · head width is not the width of the model."""
    buckets: int = field(default=32, metadata={"of": "t5"})
    distance: int = field(default=128, metadata={"of": "t5"})
    """Maximum distance between tokens that the buckets distinguish."""
    scaled_embedding: bool = field(default=True, metadata={"of": "marian"})
    """True if token embeddings are multiplied by the root of the width."""
    image: int = field(default=224, metadata={"of": "vit clip mae"})
    """Height and width in pixels of the images for which positions are stored."""
    patch: int = field(default=16, metadata={"of": "vit clip mae"})
    """Height and width of a patch in pixels."""
    channels: int = field(default=3, metadata={"of": "vit clip mae"})
    pool: str = field(default="class", metadata={"of": "vit clip"})
    """Input of the head. "class" is the class token. "mean" is the mean of all patches in a model without a class
    token. "patches" (only vit) is the mean of all patches in a model with a class token."""
    text_depth: int = field(default=12, metadata={"of": "clip"})
    """Number of blocks of the caption tower; `depth`, `width`, `heads` and `hidden` describe the image tower."""
    text_width: int = field(default=512, metadata={"of": "clip"})
    text_heads: int = field(default=8, metadata={"of": "clip"})
    text_hidden: int = field(default=2048, metadata={"of": "clip"})
    space: int = field(default=512, metadata={"of": "clip"})
    """Width of the common embedding space of both towers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", self.activation or ACTIVATIONS[self.style][0])
        self._check_sizes()
        self._check_heads()
        self._check_choices()
        if self.style in ("vit", "mae"):
            self._check_image()
            object.__setattr__(self, "length", (self.image // self.patch) ** 2 + (self.pool != "mean"))
        if self.style == "mae":
            self._check_decoder()
            object.__setattr__(self, "vocabulary", self.patch**2 * self.channels)
        if self.style == "clip":
            self._check_image()
            self.caption_tower()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            follows = (name == "length" and self.style in ("vit", "mae")) or (name, self.style) == ("vocabulary", "mae")
            limit = _DEEPEST if name.endswith("depth") else _LARGEST
            if size is not None and not (follows or 1 <= size <= limit):
                raise UsageError(f"model: {name} is {size}", fix=f"set model.{name} to a value from 1 to {limit:,}")
        if self.style == "marian" and self.width % 2:
            raise UsageError(
                f"model: positions are pairs of sine and cosine, but the width is {self.width}",
                fix=f"set model.width to {self.width + 1}",
            )
        if self.buckets < 4 or self.distance <= self.buckets // 2:
            raise UsageError(
                f"model: {self.buckets} buckets cannot distinguish distances up to {self.distance} as in T5",
                fix="use 4 buckets or more, and a distance above half the number of buckets",
            )

    def _check_heads(self) -> None:
        if self.fixed_head_width is None and self.width % self.heads:
            divisors = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            near = min(divisors, key=lambda heads: abs(heads - self.heads))
            raise UsageError(
                f"model: width {self.width} does not divide into {self.heads} heads",
                fix=f"set model.heads = {near}; or set model.width to a multiple of {self.heads}",
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model: {self.heads} heads cannot share {self.kv_heads} key-value heads equally",
                fix=f"set model.kv_heads to a divisor of {self.heads}",
            )
        if self.style != "llama" and self.kv_heads != self.heads:
            raise UsageError(
                f"model: {self.kv_heads} key-value heads for {self.heads} heads, but a {self.style} model shares none",
                fix="leave model.kv_heads out; or choose a llama preset",
            )
        if self.style == "llama" and self.head_width % 2:
            raise UsageError(
                f"model: rotary positions rotate pairs of channels, but the width of a head is {self.head_width}",
                fix=f"set model.width to a multiple of {2 * self.heads}",
            )

    def _check_choices(self) -> None:
        if self.activation not in ACTIVATIONS[self.style]:
            raise UsageError(
                f"model: a {self.style} model has no activation {self.activation!r}",
                fix=f"choose one of {', '.join(ACTIVATIONS[self.style])}",
            )
        for each in fields(self):
            styles = each.metadata.get("of", self.style).split()
            if self.style not in styles and getattr(self, each.name) != each.default:
                raise UsageError(
                    f"model: {each.name} is set, but a {self.style} model has none", fix="leave the field out"
                )

    def _check_image(self) -> None:
        if self.image % self.patch:
            divisors = [size for size in range(1, self.image + 1) if self.image % size == 0]
            near = min(divisors, key=lambda size: abs(size - self.patch))
            raise UsageError(
                f"model: images of {self.image} x {self.image} pixels cannot be cut into patches of {self.patch}",
                fix=f"set model.patch = {near}; or set data.size to a multiple of {self.patch}",
            )
        pools = ("class", "mean", "patches") if self.style == "vit" else ("class", "mean")
        refuse_unknown("model: pool is", self.pool, pools)

    def _check_decoder(self) -> None:
        if self.decoder_width % self.decoder_heads:
            raise UsageError(
                f"model: a decoder of width {self.decoder_width} does not divide into {self.decoder_heads} heads",
                fix=f"set model.decoder_width to a multiple of {self.decoder_heads}",
            )
        for name, width in (("width", self.width), ("decoder_width", self.decoder_width)):
            if width % 4:
                raise UsageError(
                    f"model: {name} is {width}, but two-dimensional position embeddings require a multiple of 4",
                    fix=f"set model.{name} to {-(-width // 4) * 4}",
                )

    def caption_tower(self) -> "ModelConfig":
        """Return the shape of a clip's caption tower, as a decoder with an output in the common space. Raise UsageError
        for incompatible sizes."""
        sizes = self.text_depth, self.text_width, self.text_heads, self.text_heads, self.text_hidden
        return ModelConfig("gpt", *sizes, self.vocabulary, self.length, tied=False, norm_eps=self.norm_eps)

    @property
    def head_width(self) -> int:
        return self.fixed_head_width or self.width // self.heads

    @property
    def decoder_blocks(self) -> int:
        return self.decoder_depth or self.depth
