"""Pooling of neighboring token embeddings before the blocks, in training only.

The output of a group of tokens predicts the token after the group, so that no token is predicted from itself. Targets
inside a group are dropped.
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
    """Average x over groups of `group` neighboring tokens. x is (b, t, d), the result is (b, t // group, d).

    An incomplete group is dropped.
    """
    whole = x.shape[1] // group * group
    return x[:, :whole].unflatten(1, (-1, group)).mean(2)


def pool_targets(tokens: Tensor, group: int) -> Tensor:
    """Return the targets of pooled tokens: the first token, and the token after each group.

    Tokens are (b, t + 1), the result is (b, t // group + 1).
    """
    return tokens[:, ::group]


def add_pooling(model: nn.Module, group: int) -> None:
    """Pool the input of the first block in training. The model's note `POOLED_IN` stores the group size.

    Raises RefusedError for a model with several stacks.
    """
    stacks = find_stacks(model)
    if len(stacks) > 1:
        raise RefusedError(
            f"pooling supports one stack of blocks, not {' and '.join(stacks)}",
            fix="--set techniques.growth.compound.shorten=truncate",
        )
    POOLED_IN.set(model, group)
    wrap_forward(next(iter(stacks.values()))[0], partial(_pooling, group))


def _pooling(group: int, block: nn.Module, inner: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not block.training:
        return inner(x, *args, **kwargs)
    if any(isinstance(each, Tensor | tuple) for each in (*args, *kwargs.values())):
        raise RefusedError(
            f"{type(block).__name__} receives a mask or positions, which pooling does not shorten",
            fix="--set techniques.growth.compound.shorten=truncate",
        )
    return inner(pool_tokens(x, group), *args, **kwargs)


class PooledObjective(WrappedObjective):
    """An objective whose targets are the tokens after each pooled group."""

    def __init__(self, inner: Objective):
        super().__init__(inner)
        self.group = 1

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.group = (POOLED_IN.get(model) or 1) if model.training else 1
        return super().predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return super().losses(prediction, self._pooled_targets(batch))

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return super().scores(prediction, self._pooled_targets(batch))

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        return super().normalizers(prediction, self._pooled_targets(batch))

    def _pooled_targets(self, batch: Batch) -> Batch:
        if self.group == 1:
            return batch
        refuse_more_than_tokens(batch, "pooling", "--set techniques.growth.compound.length=1")
        return Batch({**batch.fields, "tokens": pool_targets(batch["tokens"], self.group)}, batch.weight, batch.last)
