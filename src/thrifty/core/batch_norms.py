"""Detection of batch normalization, whose output changes when a batch is split."""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from thrifty.core.claims import Claim
from thrifty.core.technique import Numerics, Technique

DIVIDING = frozenset(
    {Claim.MICRO_BATCHES, Claim.HALF_BATCH_GRADIENTS, Claim.PIPELINE_PARALLELISM, Claim.DATA_PARALLELISM}
)
"""Claims of techniques that split the examples of a step into several forward passes."""


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of layers that normalize with batch statistics in the model's present mode."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]


def effective_numerics(technique: Technique, norms: Sequence[str]) -> Numerics:
    """Return the numerical promise of a technique on a model with the batch-norm layers `norms`."""
    return Numerics.DIFFERENT if norms and _divides(technique) else technique.numerics


def explain_divided_norms(norms: Sequence[str], techniques: Iterable[Technique]) -> str:
    """Return a sentence about how the techniques change the output of the layers `norms`; "" if no output changes."""
    dividing = names_of_dividing(techniques)
    return f"{dividing}: {normalized_apart(norms)}" if norms and dividing else ""


def names_of_dividing(techniques: Iterable[Technique]) -> str:
    """Return the names of the techniques that split the examples of a step, joined by "and"."""
    return " and ".join(technique.name for technique in techniques if _divides(technique))


def normalized_apart(norms: Sequence[str]) -> str:
    """Return the message that the layers `norms` normalize each part of a batch separately."""
    layers = (
        f"layer {norms[0]!r} normalizes" if len(norms) == 1 else f"{len(norms)} layers such as {norms[0]!r} normalize"
    )
    return f"{layers} each part of a batch by its own statistics (BatchNorm), so results differ from the whole batch's"


def _divides(technique: Technique) -> bool:
    return not technique.claims.isdisjoint(DIVIDING)
