"""Layers that normalize the examples of a forward pass together, so that a batch in parts is another batch to them."""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from thrifty.core.claims import Claim
from thrifty.core.technique import Numerics, Technique

DIVIDING = frozenset({Claim.MICRO_BATCHES, Claim.PIPELINE_PARALLELISM, Claim.DATA_PARALLELISM})
"""Claims of techniques that divide the examples of a step among forward passes."""


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of layers that normalize by the statistics of a batch in the model's present mode."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]


def effective_numerics(technique: Technique, norms: Sequence[str]) -> Numerics:
    """Return what a technique promises of a model's values, if these layers normalize over the batch."""
    return Numerics.DIFFERENT if norms and _divides(technique) else technique.numerics


def explain_divided_norms(norms: Sequence[str], techniques: Iterable[Technique]) -> str:
    """Return how the techniques change what these layers compute; "" if they do not."""
    dividing = [technique.name for technique in techniques if _divides(technique)]
    return f"{' and '.join(dividing)}: {normalized_apart(norms)}" if norms and dividing else ""


def normalized_apart(norms: Sequence[str]) -> str:
    layers = (
        f"layer {norms[0]!r} normalizes" if len(norms) == 1 else f"{len(norms)} layers such as {norms[0]!r} normalize"
    )
    return (
        f"{layers} each part of a batch by its own statistics (BatchNorm), so that the whole batch gives other values"
    )


def _divides(technique: Technique) -> bool:
    return not technique.claims.isdisjoint(DIVIDING)
