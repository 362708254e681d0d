"""Common parts of adapters: a frozen base and a few trained parameters."""

from collections.abc import Collection

from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.run_notes import add_note
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.embeddings import find_heads, is_tied, token_tables
from thrifty.modeling.stream_norms import is_norm

TRAINED_NAMES: ModuleNote[frozenset[str]] = ModuleNote("trained_names")
ALSO_TRAINED: ModuleNote[frozenset[str]] = ModuleNote("also_trained")
"""Note on a model: parameters that every adapter leaves trainable, such as a new head without trained values."""


def train_only(model: nn.Module, names: Collection[str]) -> None:
    """Train only the parameters `names` and `ALSO_TRAINED`, and freeze all others. Note the trained names on the model,
    for `check_trained`."""
    counts, names = {True: 0, False: 0}, {*names, *(ALSO_TRAINED.get(model) or ())}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
        counts[name in names] += parameter.numel()
    TRAINED_NAMES.set(model, frozenset(names))
    add_note(f"{counts[True]:,} of {sum(counts.values()):,} parameters are trained")


def check_trained(model: nn.Module, technique: str) -> None:
    """Raise IntegrityError if the trainable parameters differ from the names that `train_only` noted."""
    names: Collection[str] = TRAINED_NAMES.get(model) or ()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (name in names):
            change = "was frozen, but is trained" if parameter.requires_grad else "was trained, but is frozen"
            raise IntegrityError(f"{technique}: {name} {change}")


def names_ending(model: nn.Module, *last: str) -> set[str]:
    """Return the names of parameters whose last component is one of `last`."""
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in last}


def norm_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of all norms."""
    owners = [name for name, module in model.named_modules() if is_norm(module)]
    return {f"{owner}.{name}" for owner in owners for name, _ in model.get_submodule(owner).named_parameters()}


def head_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of all heads (`find_heads`) that are not tied to the embedding."""
    heads, tables = find_heads(model), token_tables(model)
    if not heads:
        add_note("no head was found; none is trained")
    tied = [name for name, head in heads.items() if is_tied(head, tables)]
    for name in tied:
        add_note(f"{name} is tied to the embedding and stays frozen")
    return {f"{name}.{last}" for name in heads.keys() - tied for last, _ in heads[name].named_parameters()}


class AdapterTechnique(Technique):
    """A technique that trains a few parameters and freezes all others. The method `model` of a subclass must end with a
    call of `train_only`."""

    stage, numerics = Stage.ADAPTERS, Numerics.DIFFERENT
    claims = frozenset({Claim.FROZEN_BASE_WEIGHTS})

    def refuse_plain(self, what: str) -> RefusedError:
        """Return the error for an adapter that cannot be merged into the plain architecture."""
        return RefusedError(
            f"{what} cannot be folded into the weights of the plain architecture",
            fix="keep the base unchanged and save the adapter separately; the run folder contains both",
        )

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        check_trained(state.model, self.name)
