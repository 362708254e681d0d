"""z-loss (de Brébisson and Vincent 2016): penalize the squared logarithm of the softmax normalizer.

Paper       De Brébisson and Vincent 2016, The Z-loss (arXiv 1604.08859). The coefficient is from Chowdhery et al. 2022,
            PaLM (arXiv 2204.02311), section 5.
Promise     Logits do not drift, so long low-precision runs stay stable.
Use         criterion = thrifty.apply(torch.nn.CrossEntropyLoss(), "z_loss")
Start with  `z_loss:coefficient=1e-4`, the value of PaLM.
Cost        A second pass over the vocabulary in the backward pass of the loss.
Avoid       Losses without a softmax, and losses that compare examples. Both are refused, as is a user's loss function
            without a call of torch's cross_entropy.
Does not    Change the forward pass of the model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thrifty.core.batches import Batch
from thrifty.core.errors import NeedsTrainer, RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.module_surgery import wrap_forward


class ZLossObjective(WrappedObjective):
    """Wrapper of an objective that adds the z-loss: coefficient · mean of log(normalizer)² over an example's
    predictions.

    Each prediction has the same weight as in the inner objective's loss.
    """

    def __init__(self, inner: Objective, coefficient: float):
        super().__init__(inner)
        self.coefficient = coefficient

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        squares, shares = self.normalizers(prediction, batch).square(), prediction.shares
        return losses + self.coefficient * (squares.mean(-1) if shares is None else (squares * shares).sum(-1))


def z_loss_of(
    coefficient: float,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the z-loss that belongs to a cross-entropy with these arguments. Logits are (b, v, …) for v classes."""
    squares = logits.logsumexp(min(1, logits.ndim - 1)).square()
    if target.is_floating_point():  # class probabilities: no class is ignored
        weights = torch.ones_like(squares)
    else:
        weights = (target != ignore_index).to(squares.dtype)
        if weight is not None:
            weights = weights * weight[target.clamp(0, len(weight) - 1)]
    terms = coefficient * squares * weights
    if reduction == "mean":
        terms = terms.sum() / weights.sum()
    return terms.sum() if reduction == "sum" else terms


def _with_z_loss(
    coefficient: float, criterion: nn.CrossEntropyLoss, inner: Callable[..., Tensor], logits: Tensor, target: Tensor
) -> Tensor:
    own = criterion.weight, criterion.ignore_index, criterion.reduction
    return inner(logits, target) + z_loss_of(coefficient, logits, target, *own)


class CaughtCrossEntropy(TorchFunctionMode):
    """A mode that adds the z-loss to each call of torch's cross-entropy."""

    def __init__(self, coefficient: float):
        super().__init__()
        self.coefficient, self.calls = coefficient, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.cross_entropy:
            return result
        self.calls += 1
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        options = {name: given[name] for name in ("weight", "ignore_index", "reduction") if name in given}
        return result + z_loss_of(self.coefficient, given["input"], given["target"], **options)


class ZLossInFunction(WrappedObjective):
    """A user's loss function, whose calls of torch's cross-entropy have the z-loss."""

    def __init__(self, inner: Objective, coefficient: float):
        super().__init__(inner)
        self.coefficient = coefficient

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        with CaughtCrossEntropy(self.coefficient) as caught:
            prediction = super().predict(model, batch)
        if not caught.calls:
            raise RefusedError(
                "the loss calls no torch.nn.functional.cross_entropy, so it has no softmax",
                fix="use that function in the loss; or --without losses.z_loss",
            )
        return prediction


class ZLoss(Technique):
    stage, numerics = Stage.OBJECTIVE, Numerics.DIFFERENT

    coefficient: float = 1e-4

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def change_forward(self, model: nn.Module) -> None:
        if not isinstance(model, nn.CrossEntropyLoss):
            raise NeedsTrainer(
                f"{self.name} changes a loss, and {type(model).__name__!r} is not a torch.nn.CrossEntropyLoss",
                fix=f"criterion = thrifty.apply(nn.CrossEntropyLoss(), {self.name!r}); or "
                f"thrifty.losses.chunked_cross_entropy(…, z_loss={self.coefficient:g})",
            )
        wrap_forward(model, partial(_with_z_loss, self.coefficient))

    def objective(self, objective: Objective) -> Objective:
        if objective.joint:
            raise RefusedError(
                "a loss that compares examples has no softmax normalizer per example",
                fix=f"--without {self.name}",
            )
        plain = type(objective.baseline)
        if not objective.learns_from:  # the user's own loss
            return ZLossInFunction(objective, self.coefficient)
        if plain.normalizers is Objective.normalizers:
            raise RefusedError(f"the objective {plain.__name__!r} has no softmax", fix=f"--without {self.name}")
        return ZLossObjective(objective, self.coefficient)
