"""What is learned: a prediction from a batch, and one loss per example."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from thrifty.core.batches import Batch


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

    @cached_property
    def logits(self) -> Tensor:
        if self.given is not None:
            return self.given
        assert self.head is not None and self.hidden is not None
        return self.head(self.hidden)


class Objective:
    """`losses` is per example, so that data selection can weigh and distribution only ever sums."""

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

    def tokens(self, batch: Batch) -> int:
        """How many predictions this batch trains."""
        return len(batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> "Objective":
        """This objective with its own arithmetic passed through a compiler; itself where there is none worth it."""
        return self


class Around(Objective):
    """Another objective with something changed: whatever a subclass does not override is the inner one's."""

    def __init__(self, inner: Objective):
        self.inner = inner

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return self.inner.predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.losses(prediction, batch)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.scores(prediction, batch)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.normalizers(prediction, batch)

    def tokens(self, batch: Batch) -> int:
        return self.inner.tokens(batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> Objective:
        changed = copy(self)
        changed.inner = self.inner.compiled(compile)
        return changed
