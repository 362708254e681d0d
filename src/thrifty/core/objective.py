"""Learning objective: a prediction from a batch, and one loss per example."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError


@dataclass
class Prediction:
    """A model's output for a batch: hidden states (b, t, d) and the head, or logits (b, t, v). Logits are computed on
    first access only. A loss that processes the vocabulary in chunks never needs them."""

    hidden: Tensor | None = None
    head: nn.Module | None = None
    output: Tensor | None = field(default=None, repr=False)
    normalizers: Tensor | None = field(default=None, repr=False)
    """Softmax normalizers that a loss stores here for terms that need them too."""
    shares: Tensor | None = field(default=None, repr=False)
    """Weight of each prediction within its example, stored by a loss; None if all are equal."""

    part_weights: Tensor | None = field(default=None, repr=False)
    """Total weight of each example's parts (b,), if its loss is their weighted sum and the mean is over parts. None if
    each example counts by its own weight alone."""
    is_mean: bool = False
    """True if the losses are one mean over the rows, repeated. Rows then cannot have different weights, and means over
    unequal numbers of rows cannot be added."""

    @cached_property
    def logits(self) -> Tensor:
        if self.output is not None:
            return self.output
        assert self.head is not None and self.hidden is not None
        return self.head(self.hidden)


@dataclass(frozen=True)
class ChatLearningSettings:
    """Learned parts and row layout of conversations."""

    everything: bool = False
    """True to learn every token, False to learn only the tokens of answers."""
    by_tokens: bool = True
    """True if every token has equal weight, False if every conversation has."""
    together: bool = True
    """True to pack as many conversations into a row as fit, False for one conversation per row."""
    template: str = ""
    """A chat template by name or file; empty takes the tokenizer's own."""


class TokenizerInfo(Protocol):
    """Properties of a tokenizer that an objective requires."""

    end_of_text: int
    special: frozenset[int]
    """Token ids that no text is encoded to."""

    @property
    def vocabulary(self) -> int: ...

    def number_of(self, *names: str) -> int:
        """Return the id of the special token with one of these names; raise UsageError if there is none."""
        ...


class Objective:
    """Base of learning objectives.

    `losses` returns one loss per example, so that data selection can weigh examples and ranks only sum.

    `measured` names the metrics of `measures`, in addition to the loss. `summarized` names the metrics of `overall`,
    which are computed from the rows `collected` of all held-out examples. `pictured` describes the images of
    `image_previews`; it is empty without images.

    `learns_from` lists the accepted kinds of data. A source is opened as the first kind that it contains, else as the
    last (see `data.data_kind`). `needs_labels` is True if images must have labels. `joint` is True if an example's loss
    depends on the other examples of the effective batch, which then cannot be split.

    The last seven methods define how sources become examples; by default they change nothing.
    """

    learns_from: tuple[Literal["text", "text_pairs", "labelled_text", "chats", "images", "pairs"], ...] = ("text",)
    needs_labels: bool = False
    label_form: Literal["class", "number", "classes", "tags"] = "class"
    """Form of a text's label: one class, a number, any number of classes, or one class for each word."""
    loss_in: str = "nats"
    """Unit of the loss."""
    joint: bool = False
    may_weigh_parts: bool = False
    """True if predictions may have `part_weights`."""
    measured: tuple[str, ...] = ()
    collected: tuple[str, ...] = ()
    summarized: tuple[str, ...] = ()
    pictured: str = ""

    @property
    def sees_images(self) -> bool:
        """True if it learns from images."""
        return not {"images", "pairs"}.isdisjoint(self.learns_from)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are evaluated in addition to the loss."""
        return self.measured + self.summarized

    @property
    def baseline(self) -> "Objective":
        """The objective without the wrappers of techniques."""
        return self

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        raise NotImplementedError

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return one loss per example, (b,) in float32."""
        raise NotImplementedError

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return each example's norm of the loss gradient at the logits (b,), a measure of its effect on the model."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient-norm scores")

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return the logarithm of each prediction's softmax normalizer, (b, …) in float32."""
        raise NotImplementedError(f"{type(self).__name__} has no softmax normalizer")

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return metrics per example (b,), by the names in `measured`; their weighted mean is evaluated. Sums over an
        example's parts come with the parts' weights, (2, b). A mean over the rows is a scalar. The result also has rows
        (n, …) of the batch by the names in `collected`; `overall` receives them for all batches."""
        return {}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics by the names in `summarized`, computed from the collected rows of all examples."""
        return {}

    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return images (b, c, h, w) that show a prediction, by title, in display order. Pixels are normalized as in
        the model's input."""
        return {}

    def tokens(self, batch: Batch) -> int:
        """Return the number of tokens in this batch, as a budget counts them."""
        return len(batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> "Objective":
        """Return this objective with its arithmetic compiled, or itself if that brings no gain."""
        return self

    def text_length(self, length: int) -> int:
        """Return the number of tokens of plain text in an example of `length` tokens."""
        return length

    def special_tokens(self, length: int) -> tuple[str, ...]:
        """Return the special tokens, in addition to the end of text, for a tokenizer trained for this length."""
        return ()

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "Objective":
        """Return this objective with the token ids that it uses for examples of this length."""
        return self

    def with_labels(self, labels: Sequence[str]) -> "Objective":
        """Return this objective for texts whose labels have these names."""
        return self

    def kept_apart(self, end_of_text: int) -> "Objective":
        """Return this objective for rows whose documents, each ended by this token, do not attend to each other. Raises
        UsageError if the objective has no such documents."""
        raise UsageError(
            f"data.separate is set, but {type(self).__name__} has no documents in a row to separate",
            fix="leave data.separate out, or learn next_token",
        )

    def with_patch_size(self, patch: int | None) -> "Objective":
        """Return this objective for a model with image patches of this height and width in pixels, or None."""
        return self

    def chat_learning(self) -> ChatLearningSettings:
        """Return the settings for learning conversations."""
        return ChatLearningSettings()

    def examples(self, batch: Batch) -> Batch:
        """Return the training examples made from plain examples, a pure function of each row. Rows of text have
        "tokens" (b, t+1) and "key" (b,): 64 bits, unique in the run, that seed all random draws. Rows of images have
        "inputs" (b, c, h, w), "key" and, with labels, "labels"."""
        return batch


class WrappedObjective(Objective):
    """Wrapper of another objective; methods that a subclass does not override are the inner one's."""

    def __init__(self, inner: Objective):
        self.inner = inner
        self.measured, self.joint, self.loss_in = inner.measured, inner.joint, inner.loss_in
        self.collected, self.summarized = inner.collected, inner.summarized
        self.pictured = inner.pictured
        self.learns_from, self.needs_labels = inner.learns_from, inner.needs_labels

    @property
    def baseline(self) -> Objective:
        return self.inner.baseline

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return self.inner.predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.losses(prediction, batch)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.scores(prediction, batch)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.normalizers(prediction, batch)

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        return self.inner.measures(prediction, batch)

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return self.inner.overall(model, rows)

    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        return self.inner.image_previews(prediction, batch)

    def tokens(self, batch: Batch) -> int:
        return self.inner.tokens(batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> Objective:
        changed = copy(self)
        changed.inner = self.inner.compiled(compile)
        return changed

    def text_length(self, length: int) -> int:
        return self.inner.text_length(length)

    def special_tokens(self, length: int) -> tuple[str, ...]:
        return self.inner.special_tokens(length)

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> Objective:
        changed = copy(self)
        changed.inner = self.inner.with_tokenizer(tokens, length)
        return changed

    def with_patch_size(self, patch: int | None) -> Objective:
        changed = copy(self)
        changed.inner = self.inner.with_patch_size(patch)
        return changed

    def chat_learning(self) -> ChatLearningSettings:
        return self.inner.chat_learning()

    def examples(self, batch: Batch) -> Batch:
        return self.inner.examples(batch)
