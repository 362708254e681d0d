"""The sizes and choices that decide a model."""

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
"""What each style's feed-forward network may have; the first is its own."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's parameters and arithmetic.

    Raises UsageError where sizes cannot go together, and for a field given to a style that it is not one `of`.
    """

    style: Style
    depth: int
    """Blocks; of the encoder where there is one."""
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Inner width of the feed-forward network."""
    vocabulary: int
    """Tokens that there are; of a vit the labels, of a mae the numbers that a patch consists of."""
    length: int
    """Tokens of context: the positions of gpt, bert, marian and clip, the trained context of llama and t5. Of a vit
    and a mae it follows from the image and the patches, whatever is given."""
    tied: bool
    norm_eps: float = 1e-5
    activation: str = ""
    """Of the feed-forward network, as in `ACTIVATIONS`; the style's own when empty."""
    rope_base: float = field(default=10_000.0, metadata={"of": "llama"})
    rope_scaling: Llama3Scaling | None = field(default=None, metadata={"of": "llama"})
    token_types: int = field(default=2, metadata={"of": "bert"})
    decoder_depth: int | None = field(default=None, metadata={"of": "t5 marian mae"})
    """Blocks of the decoder where they are not as many as the encoder's."""
    decoder_width: int = field(default=512, metadata={"of": "mae"})
    decoder_heads: int = field(default=16, metadata={"of": "mae"})
    decoder_hidden: int = field(default=2048, metadata={"of": "mae"})
    fixed_head_width: int | None = field(default=None, metadata={"of": "t5 llama"})
    """Width of a head where the heads together are not as wide as the model."""
    buckets: int = field(default=32, metadata={"of": "t5"})
    distance: int = field(default=128, metadata={"of": "t5"})
    """Distances between tokens up to this one are told apart, in so many buckets."""
    scaled_embedding: bool = field(default=True, metadata={"of": "marian"})
    """Whether token embeddings are multiplied by the root of the width."""
    image: int = field(default=224, metadata={"of": "vit clip mae"})
    """Height and width of the images that positions are for, in pixels."""
    patch: int = field(default=16, metadata={"of": "vit clip mae"})
    """Height and width of a patch, in pixels."""
    channels: int = field(default=3, metadata={"of": "vit clip mae"})
    pool: str = field(default="class", metadata={"of": "vit clip"})
    """What the head is given: "class" for the class token, "mean" for the mean of all patches of a model without one,
    of a vit also "patches" for that mean in a model that has one too."""
    text_depth: int = field(default=12, metadata={"of": "clip"})
    """Blocks of the tower that reads captions; the sizes above are those of the tower that looks at images."""
    text_width: int = field(default=512, metadata={"of": "clip"})
    text_heads: int = field(default=8, metadata={"of": "clip"})
    text_hidden: int = field(default=2048, metadata={"of": "clip"})
    space: int = field(default=512, metadata={"of": "clip"})
    """Width of the space that both towers end in."""

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
                raise UsageError(f"model: {name} is {size}", fix=f"give a {name} of 1 to {limit:,}")
        if self.style == "marian" and self.width % 2:
            raise UsageError(
                f"model: positions are pairs of sine and cosine, and the width is {self.width}",
                fix=f"set model.width to {self.width + 1}",
            )
        if self.buckets < 4 or self.distance <= self.buckets // 2:
            raise UsageError(
                f"model: distances up to {self.distance} cannot be told apart by {self.buckets} buckets as T5 does",
                fix="give 4 buckets or more, and a distance above half their number",
            )

    def _check_heads(self) -> None:
        if self.fixed_head_width is None and self.width % self.heads:
            divisors = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            near = min(divisors, key=lambda heads: abs(heads - self.heads))
            raise UsageError(
                f"model: width {self.width} does not divide into {self.heads} heads",
                fix=f"set model.heads = {near}, or a width that is a multiple of {self.heads}",
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model: {self.heads} heads cannot share {self.kv_heads} key-value heads equally",
                fix=f"set model.kv_heads to a divisor of {self.heads}",
            )
        if self.style != "llama" and self.kv_heads != self.heads:
            raise UsageError(
                f"model: {self.kv_heads} key-value heads for {self.heads} heads, and a {self.style} model shares none",
                fix="leave model.kv_heads out, or choose a llama preset",
            )
        if self.style == "llama" and self.head_width % 2:
            raise UsageError(
                f"model: rotary positions turn pairs of channels, and a head is {self.head_width} wide",
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
                raise UsageError(f"model: {each.name} is given, and a {self.style} model has none", fix="leave it out")

    def _check_image(self) -> None:
        if self.image % self.patch:
            divisors = [size for size in range(1, self.image + 1) if self.image % size == 0]
            near = min(divisors, key=lambda size: abs(size - self.patch))
            raise UsageError(
                f"model: images of {self.image} x {self.image} pixels cannot be cut into patches of {self.patch}",
                fix=f"set model.patch = {near}, or data.size to a multiple of {self.patch}",
            )
        pools = ("class", "mean", "patches") if self.style == "vit" else ("class", "mean")
        refuse_unknown("model: pool is", self.pool, pools)

    def _check_decoder(self) -> None:
        if self.decoder_width % self.decoder_heads:
            raise UsageError(
                f"model: a decoder of width {self.decoder_width} does not divide into {self.decoder_heads} heads",
                fix="set model.decoder_width to a multiple of that",
            )
        for name, width in (("width", self.width), ("decoder_width", self.decoder_width)):
            if width % 4:
                raise UsageError(
                    f"model: positions in two directions are sines and cosines of four equal parts, and the {name} is "
                    f"{width}",
                    fix=f"set model.{name} to {-(-width // 4) * 4}",
                )

    def caption_tower(self) -> "ModelConfig":
        """Of a clip: the tower that reads captions, as a decoder that ends in the space. Raises UsageError where its
        sizes cannot go together."""
        sizes = self.text_depth, self.text_width, self.text_heads, self.text_heads, self.text_hidden
        return ModelConfig("gpt", *sizes, self.vocabulary, self.length, tied=False, norm_eps=self.norm_eps)

    @property
    def head_width(self) -> int:
        return self.fixed_head_width or self.width // self.heads

    @property
    def decoder_blocks(self) -> int:
        """Blocks of the decoder of an encoder–decoder."""
        return self.decoder_depth or self.depth
