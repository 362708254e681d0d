"""Texts that are pooled in front of the blocks: the mean of so many neighbours in the place of each of them.

Only in training. What a group of k tokens gives is asked for the token behind the group, so that nothing is predicted
from itself; targets in between are left out.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.modeling.module_surgery import find_stacks, wrap_forward
from thrifty.modeling.text_lengths import refuse_more_than_tokens

POOLED_IN: ModuleNote[int] = ModuleNote("pooled_in")


def pool_tokens(x: Tensor, group: int) -> Tensor:
    """x (b, t, d) to the means of groups of neighbours (b, t // group, d); what is left at the end is cut off."""
    whole = x.shape[1] // group * group
    return x[:, :whole].unflatten(1, (-1, group)).mean(2)


def pool_targets(tokens: Tensor, group: int) -> Tensor:
    """tokens (b, t + 1) to those of which all but the first stand behind a group: (b, t // group + 1)."""
    return tokens[:, ::group]


def add_pooling(model: nn.Module, group: int) -> None:
    """Let a model in training pool what its first block is given. Its note `POOLED_IN` says how many tokens
    make one. Raises RefusedError for a model with several stacks."""
    stacks = find_stacks(model)
    if len(stacks) > 1:
        raise RefusedError(f"{' and '.join(stacks)} would both have to be pooled", fix='set shorten="truncate"')
    POOLED_IN.set(model, group)
    wrap_forward(next(iter(stacks.values()))[0], partial(_pooling, group))


def _pooling(group: int, block: nn.Module, inner: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not block.training:
        return inner(x, *args, **kwargs)
    if any(isinstance(each, Tensor | tuple) for each in (*args, *kwargs.values())):
        raise RefusedError(
            f"{type(block).__name__} is given a mask or positions beside its tokens, which would have to be pooled too",
            fix='set shorten="truncate"',
        )
    return inner(pool_tokens(x, group), *args, **kwargs)


class PooledObjective(WrappedObjective):
    """An objective whose targets are those of a model that pools, where it does."""

    def __init__(self, inner: Objective):
        super().__init__(inner)
        self.group = 1

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.group = (POOLED_IN.get(model) or 1) if model.training else 1
        return super().predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return super().losses(prediction, self._thinned(batch))

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return super().scores(prediction, self._thinned(batch))

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        return super().normalizers(prediction, self._thinned(batch))

    def _thinned(self, batch: Batch) -> Batch:
        if self.group == 1:
            return batch
        refuse_more_than_tokens(batch, "pooling", "leave the length alone: length=1")
        return Batch({**batch.fields, "tokens": pool_targets(batch["tokens"], self.group)}, batch.weight, batch.last)
