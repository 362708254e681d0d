"""Learning objective: computes a prediction from a batch, and one loss per example."""

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
    """Output of a model for a batch: hidden states (b, t, d) and the output head, or logits (b, t, v). The letters are
    the numbers of examples, tokens, hidden dims and vocabulary entries. Logits are computed on first access. A loss
    that processes the vocabulary in chunks never computes all logits."""

    hidden: Tensor | None = None
    head: nn.Module | None = None
    output: Tensor | None = field(default=None, repr=False)
    normalizers: Tensor | None = field(default=None, repr=False)
    """Logarithms of the softmax normalizers, stored by a loss so that other loss terms can use them."""
    shares: Tensor | None = field(default=None, repr=False)
    """Weight of each prediction within its example, stored by a loss; None for equal weights."""

    part_weights: Tensor | None = field(default=None, repr=False)
    """Total weight of the parts of each example, such as its answer tokens; one value per example, (b,). The loss of an
    example is then the weighted sum over its parts, and the loss of a batch is the mean over all parts. None if only
    examples have weights.
    """
    is_mean: bool = False
    """True if the losses are one mean over the rows, repeated for each row. Rows then cannot have different weights,
    and micro-batches must have equal numbers of rows."""

    @cached_property
    def logits(self) -> Tensor:
        if self.output is not None:
            return self.output
        assert self.head is not None and self.hidden is not None
        return self.head(self.hidden)


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the `head` of a model that returns hidden states, or None if it returns logits. A model of the first kind
    has the attribute `has_separate_head = True`."""
    return getattr(model, "head", None) if getattr(model, "has_separate_head", False) else None


@dataclass(frozen=True)
class ChatLearningSettings:
    """Settings for conversations: the tokens to learn, and the packing into rows."""

    everything: bool = False
    """True to learn every token, False to learn only the tokens of answers."""
    by_tokens: bool = True
    """True if every token has equal weight, False if every conversation has equal weight."""
    together: bool = True
    """True to pack as many conversations into a row as fit, False for one conversation per row."""
    template: str = ""
    """Name or file of a chat template; empty for the tokenizer's own template."""


class TokenizerInfo(Protocol):
    """Tokenizer properties that an objective requires."""

    end_of_text: int
    special: frozenset[int]
    """Ids of special tokens, which encoded text never contains."""

    @property
    def vocabulary(self) -> int: ...

    def number_of(self, *names: str) -> int:
        """Return the id of the special token with one of these names. Raise UsageError if the tokenizer has no such
        token."""
        ...


class Objective:
    """Base class of learning objectives.

    `losses` returns one loss per example. Data selection can therefore weight examples, and ranks only add gradients.

    `measured` names the metrics that `measures` returns in addition to the loss. `collected` names the rows that
    `measures` collects from all held-out examples. `summarized` names the metrics that `overall` computes from these
    rows. `pictured` describes the images of `image_previews`; it is empty without images.

    `learns_from` lists the accepted kinds of data. A source is opened as the first listed kind that it contains. If it
    contains none, it is opened as the last listed kind (see `data.data_kind`). `needs_labels` is True if images must
    have labels. `joint` is True if the loss of an example depends on other examples of the effective batch. The
    effective batch then cannot be split.

    The methods after `compiled` define how sources become examples. By default they change nothing.
    """

    learns_from: tuple[Literal["text", "text_pairs", "labelled_text", "chats", "images", "pairs"], ...] = ("text",)
    needs_labels: bool = False
    label_form: Literal["class", "number", "classes", "tags"] = "class"
    """Form of a text's label: one class, a number, any number of classes, or one class per word."""
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
        """True if the objective learns from images."""
        return not {"images", "pairs"}.isdisjoint(self.learns_from)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are evaluated in addition to the loss."""
        return self.measured + self.summarized

    @property
    def baseline(self) -> "Objective":
        """The objective without the wrappers that techniques add."""
        return self

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        raise NotImplementedError

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return one float32 loss per example (b,)."""
        raise NotImplementedError

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return, for each example, the norm of the loss gradient with respect to the logits, (b,). The norm estimates
        how much the example changes the model."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient-norm scores")

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return the logarithm of each prediction's softmax normalizer, in float32, (b, …)."""
        raise NotImplementedError(f"{type(self).__name__} has no softmax normalizer")

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics named in `measured`, each in one of three forms. A metric per example (b,) is evaluated as
        a weighted mean. A sum over the parts of each example is stacked with the weights of the parts, (2, b). A mean
        over the rows is a scalar. The result also has the rows (n, …) named in `collected`. `overall` receives the
        collected rows of all batches."""
        return {}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics named in `summarized`, computed from the collected rows of all examples."""
        return {}

    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return images (b, c, h, w) that show a prediction, keyed by title, in display order. Pixels are normalized as
        in the model's input."""
        return {}

    def tokens(self, batch: Batch) -> int:
        """Return the number of tokens in the batch that count toward a token budget."""
        return len(batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> "Objective":
        """Return the objective with compiled arithmetic, or the objective itself if compilation brings no gain."""
        return self

    def text_length(self, length: int) -> int:
        """Return the number of tokens of plain text in an example of `length` tokens."""
        return length

    def special_tokens(self, length: int) -> tuple[str, ...]:
        """Return the special tokens, except end of text, that a tokenizer for examples of `length` tokens requires."""
        return ()

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "Objective":
        """Return a copy of the objective with the token ids that it requires for examples of `length` tokens."""
        return self

    def with_labels(self, labels: Sequence[str]) -> "Objective":
        """Return a copy of the objective for texts with these label names."""
        return self

    def kept_apart(self, end_of_text: int) -> "Objective":
        """Return a copy of the objective for rows whose documents do not attend to each other. The token `end_of_text`
        ends each document. Raise UsageError if the objective does not pack documents into rows."""
        raise UsageError(
            f"data.separate is set, but {type(self).__name__} does not pack documents into rows",
            fix="remove data.separate; or --set objective.name=next_token",
        )

    def with_patch_size(self, patch: int | None) -> "Objective":
        """Return a copy of the objective for a model with patches of `patch` x `patch` pixels; None without patches."""
        return self

    def chat_learning(self) -> ChatLearningSettings:
        """Return the settings for conversations."""
        return ChatLearningSettings()

    def examples(self, batch: Batch) -> Batch:
        """Return training examples made from the rows of a source. Each example must depend on its own row only. Text
        rows have "tokens" (b, t+1) and "key" (b,). A key has 64 bits, is unique in the run, and seeds all random values
        of its row. Image rows have "inputs" (b, c, h, w), "key" and, with labels, "labels"."""
        return batch


class WrappedObjective(Objective):
    """Wrapper of another objective. Methods that a subclass does not override call the inner objective."""

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
