"""What data asks of a model's two ends: the kind of inputs that it takes, and how many things it can answer."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TextModelSpec:
    vocabulary: int
    """Tokens that there are."""
    length: int
    """Tokens of an example."""
    labels: tuple[str, ...] = ()
    """Names of the classes, or of the predicted number, in the order of the model's outputs; none for a language
    model."""
    padding: int = 0
    """The token that fills rows; of labelled texts alone."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "TextModelSpec":
        return cls(**{**data, "labels": tuple(data.get("labels", ()))})


@dataclass(frozen=True)
class ImageModelSpec:
    labels: tuple[str, ...]
    """What images are told apart by, in the order of the model's outputs; none where they only are looked at."""
    side: int
    """Images are so many pixels high and wide."""
    channels: int
    mean: tuple[float, ...]
    """Of each channel, pixels being 0 … 1: subtracted before a model sees an image."""
    std: tuple[float, ...]
    """Of each channel: divided by after that."""

    def as_data(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "ImageModelSpec":
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


@dataclass(frozen=True)
class PairModelSpec:
    """Of images with captions: a model of two towers takes both."""

    images: ImageModelSpec
    text: TextModelSpec

    def as_data(self) -> dict[str, Any]:
        return {"images": self.images.as_data(), "text": self.text.as_data()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "PairModelSpec":
        return cls(ImageModelSpec.from_data(data["images"]), TextModelSpec.from_data(data["text"]))


ModelSpec = TextModelSpec | ImageModelSpec | PairModelSpec
