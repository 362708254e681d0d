"""Input and output sizes that a data source requires of a model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TextModelSpec:
    vocabulary: int
    """Size of the vocabulary."""
    length: int
    """Number of tokens per example."""
    labels: tuple[str, ...] = ()
    """Names of the model's outputs in order: the class names, or the name of the predicted number. Empty for a language
    model."""
    padding: int = 0
    """Token id of padding, for labeled texts only."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "TextModelSpec":
        return cls(**{**data, "labels": tuple(data.get("labels", ()))})


@dataclass(frozen=True)
class ImageModelSpec:
    labels: tuple[str, ...]
    """Class names in the order of the model's outputs. Empty for objectives without labels."""
    side: int
    """Height and width of images in pixels."""
    channels: int
    mean: tuple[float, ...]
    """Mean of each channel, for pixels in 0 … 1; subtracted before the model receives an image."""
    std: tuple[float, ...]
    """Standard deviation of each channel, by which the centered pixels are divided."""

    def as_data(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "ImageModelSpec":
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


@dataclass(frozen=True)
class PairModelSpec:
    """Specification of image-caption pairs, for a model with two encoders."""

    images: ImageModelSpec
    text: TextModelSpec

    def as_data(self) -> dict[str, Any]:
        return {"images": self.images.as_data(), "text": self.text.as_data()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "PairModelSpec":
        return cls(ImageModelSpec.from_data(data["images"]), TextModelSpec.from_data(data["text"]))


@dataclass(frozen=True)
class UserModelSpec:
    """Model requirements of user data: none, because only the user's loss calls the model."""


ModelSpec = TextModelSpec | ImageModelSpec | PairModelSpec | UserModelSpec
