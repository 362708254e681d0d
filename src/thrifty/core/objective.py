"""What is learned: a prediction from a batch, and one loss per example."""

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
    """What a model says of a batch: hidden states (b, t, d) and the head apart, or logits (b, t, v) outright.

    The logits are built only when asked for: a loss that works through the vocabulary in chunks never asks.
    """

    hidden: Tensor | None = None
    head: nn.Module | None = None
    given: Tensor | None = field(default=None, repr=False)
    normalizers: Tensor | None = field(default=None, repr=False)
    """Left here by a loss that computes them anyway, for terms that need them too."""
    shares: Tensor | None = field(default=None, repr=False)
    """Left here likewise: how much each prediction counts for its example; None where all count alike."""

    part_weights: Tensor | None = field(default=None, repr=False)
    """By how much the parts of each example count together (b,), where its loss is their weighted sum and the mean is
    over parts; None where each example counts by its weight alone."""
    is_mean: bool = False
    """True if the losses are one mean over the rows, repeated: rows then cannot weigh differently, and means of unequal
    numbers of rows have no sum."""

    @cached_property
    def logits(self) -> Tensor:
        if self.given is not None:
            return self.given
        assert self.head is not None and self.hidden is not None
        return self.head(self.hidden)


@dataclass(frozen=True)
class ChatLearningSettings:
    """What is learned of conversations, and how they are laid out."""

    everything: bool = False
    """Every token, and not only the tokens of answers."""
    by_tokens: bool = True
    """Every token counts alike; otherwise every conversation."""
    together: bool = True
    """As many conversations to a row as fit; otherwise one."""
    template: str = ""
    """A chat template by name or file; empty takes the tokenizer's own."""


class TokenizerInfo(Protocol):
    """What an objective asks of a tokenizer."""

    end_of_text: int
    special: frozenset[int]
    """Tokens that no text is encoded to."""

    @property
    def vocabulary(self) -> int: ...

    def number_of(self, *names: str) -> int:
        """The special token that has one of these names; raises UsageError where none is known."""
        ...


class Objective:
    """`losses` is per example, so that data selection can weigh and distribution only ever sums.

    `measured` are the names of what `measures` returns in addition to the loss, `summarized` those of what `overall`
    returns of the rows `collected` from all held-out examples, `pictured` is a sentence about what
    `image_previews` shows, empty where a prediction is nothing to look at; `learns_from` are the kinds of
    data it takes, of which a source is opened as the first that it holds, else as the last (see `data.data_kind`);
    `needs_labels` says whether images must come with labels. `joint` says that the loss of an example depends on the
    others of the effective batch, which then cannot be taken apart.

    The last seven methods say how sources are made into examples; they change nothing unless overridden.
    """

    learns_from: tuple[Literal["text", "text_pairs", "labelled_text", "chats", "images", "pairs"], ...] = ("text",)
    needs_labels: bool = False
    label_form: Literal["class", "number", "classes", "tags"] = "class"
    """The label of a text: one class, a number, any number of classes, or one class for each word."""
    loss_in: str = "nats"
    """What the loss is a number of."""
    joint: bool = False
    may_weigh_parts: bool = False
    """True if predictions may have `part_weights`."""
    measured: tuple[str, ...] = ()
    collected: tuple[str, ...] = ()
    summarized: tuple[str, ...] = ()
    pictured: str = ""

    @property
    def sees_images(self) -> bool:
        """Whether images are among what it learns from."""
        return not {"images", "pairs"}.isdisjoint(self.learns_from)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is evaluated in addition to the loss."""
        return self.measured + self.summarized

    @property
    def baseline(self) -> "Objective":
        """The objective without what techniques have put around it."""
        return self

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        raise NotImplementedError

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        """One loss per example, (b,) in float32."""
        raise NotImplementedError

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Per example, the norm of the loss gradient at the logits (b,): how much the example would move the model."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient-norm scores")

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """The logarithm of the softmax's normaliser of each prediction, (b, …) in float32."""
        raise NotImplementedError(f"{type(self).__name__} has no softmax normaliser")

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return metrics per example (b,), by the names in `measured`; their weighted mean is evaluated.
        Sums over an example's parts come with the weights of those, (2, b); a mean over the rows is a scalar.
        With them come, by the names in `collected`, rows (n, …) of the batch, which `overall` is given of all."""
        return {}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics, by the names in `summarized`, that are no means over examples, of the rows of all."""
        return {}

    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """What a person can see of a prediction: images (b, c, h, w) by what they are, in the order in which they are
        looked at, their pixels as a model is given them."""
        return {}

    def tokens(self, batch: Batch) -> int:
        """How many tokens of the data this batch goes through, as a budget counts them."""
        return len(batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> "Objective":
        """This objective with its own arithmetic passed through a compiler; itself where there is none worth it."""
        return self

    def text_length(self, length: int) -> int:
        """Tokens of plain text that an example of `length` tokens is made of."""
        return length

    def special_tokens(self, length: int) -> tuple[str, ...]:
        """What a tokenizer trained for examples of this length must set apart, besides the end of text."""
        return ()

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "Objective":
        """This objective with the token numbers that it needs for examples of this length."""
        return self

    def with_labels(self, labels: Sequence[str]) -> "Objective":
        """Return this objective for texts whose labels have these names."""
        return self

    def kept_apart(self, end_of_text: int) -> "Objective":
        """Return this objective for rows in which documents, each ended by this token, see nothing of each other.
        Raises UsageError where they share what is learned."""
        raise UsageError(
            f"data.separate is set, and {type(self).__name__} has no documents in a row to keep apart",
            fix="leave data.separate out, or learn next_token",
        )

    def with_patch_size(self, patch: int | None) -> "Objective":
        """This objective for a model that cuts images into patches of so many pixels' side, where it does."""
        return self

    def chat_learning(self) -> ChatLearningSettings:
        """What this objective learns of conversations."""
        return ChatLearningSettings()

    def examples(self, batch: Batch) -> Batch:
        """What is learned from, made of plain examples: a pure function of each row by itself.

        Rows of text come as "tokens" (b, t+1) and "key" (b,), 64 random bits for each that no other row of the run
        has: where something must be drawn, it is drawn from those. Rows of images come as "inputs" (b, c, h, w), a
        "key" and, where they have them, "labels".
        """
        return batch


class WrappedObjective(Objective):
    """Another objective with something changed: whatever a subclass does not override is the inner one's."""

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
