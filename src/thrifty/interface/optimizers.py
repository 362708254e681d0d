"""Torch optimizer classes of techniques, by class name."""

import inspect
from functools import cache

from thrifty import techniques
from thrifty.composition.technique_optimizer import TechniqueOptimizer
from thrifty.core.claims import Claim
from thrifty.core.errors import did_you_mean
from thrifty.core.technique import Technique


@cache
def _optimizers() -> dict[str, type[Technique]]:
    kinds = (techniques.find(name) for name in techniques.own_names() if name.startswith("optimizers."))
    return {each.__name__: each for each in kinds if Claim.OPTIMIZER in each.claims}


def optimizer_names() -> list[str]:
    """Return the class names of all optimizers."""
    return sorted(_optimizers())


def optimizer_named(name: str) -> type[TechniqueOptimizer]:
    """Return a technique's torch optimizer class by class name. Raise AttributeError if the name is unknown."""
    if name.startswith("__") or name not in _optimizers():
        hint = "" if name.startswith("_") else f"; {did_you_mean(name, _optimizers())}"
        raise AttributeError(f"module 'thrifty.optim' has no attribute {name!r}{hint}")
    return optimizer_class(_optimizers()[name])


@cache
def optimizer_class(technique: type[Technique]) -> type[TechniqueOptimizer]:
    """Return the torch optimizer class of a technique; the technique may be the user's own."""
    card = inspect.getdoc(inspect.getmodule(technique)) or inspect.getdoc(technique)
    names = {"technique": technique, "__module__": "thrifty.optim", "__doc__": card}
    return type(technique.__name__, (TechniqueOptimizer,), names)
