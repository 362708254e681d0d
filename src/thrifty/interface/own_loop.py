"""Techniques in a training loop of the user's own: `apply` and `summary`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from thrifty import techniques
from thrifty.composition.technique_optimizer import TechniqueOptimizer
from thrifty.core.claims import Claim
from thrifty.core.errors import NeedsTrainer, UsageError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.plain_values import build, read_size
from thrifty.core.run_notes import collect_notes
from thrifty.core.run_relative_settings import refuse_shares, refuse_unknown_batch, resolve_moments
from thrifty.core.technique import Technique

T = TypeVar("T", nn.Module, Optimizer, tuple[nn.Module, Optimizer])

SEAMS = {
    "batches": "the data",
    "objective": "the loss",
    "backward": "how gradients are computed",
    "changes": "the structure of the model during training",
}
"""Parts of a run that only the trainer has, by the method of a technique that changes them."""


@dataclass(frozen=True)
class AppliedTechnique:
    technique: Technique
    notes: tuple[str, ...]


APPLIED: ModuleNote[tuple[AppliedTechnique, ...]] = ModuleNote("applied")


def apply(
    target: T, technique: str | Technique | type[Technique], *, total_steps: int | None = None, **settings: Any
) -> T:
    """Apply a technique to a model, an optimizer of `thrifty.optim`, or a pair of both, and return the same objects.

    `technique` is a name ("lora", "adapters.lora"), an object or a class; `settings` are its fields. `total_steps` is
    required where a setting is a fraction of the run. The parameters of the model keep their names.

    Raises NeedsTrainer for a technique that works only in the trainer, UsageError for an unknown name or setting, and
    RefusedError where the technique does not fit the model.

    Example::

        model = thrifty.apply(model, "lora", rank=8)
        optimizer = thrifty.optim.AdamW(model, lr=1e-3)
    """
    chosen = technique_of(technique, settings)
    _refuse_trainer_only(chosen)
    model, optimizer = target if isinstance(target, tuple) else (target, target)
    model = model if isinstance(model, nn.Module) else None
    optimizer = optimizer if isinstance(optimizer, Optimizer) else None
    if model is None and optimizer is None:
        raise UsageError(
            f"thrifty.apply takes a model, an optimizer or a pair of both, and {type(target).__name__!r} is none",
            fix=f"thrifty.apply(model, {chosen.name!r})",
        )
    changes_model = chosen.overrides("model", "change_forward") and "model" not in chosen.optional_seams
    changes_update = any(chosen.overrides(seam) for seam in {"update", "hook_steps"} - chosen.optional_seams)
    if (changes_model and model is None) or (changes_update and optimizer is None):
        wanted = " and ".join(filter(None, ["the model" * changes_model, "the optimizer" * changes_update]))
        words = ", ".join(filter(None, ["model" * changes_model, "optimizer" * changes_update]))
        raise UsageError(
            f"{chosen.name} changes {wanted}",
            fix=f"thrifty.apply({f'({words})' if ',' in words else words}, {chosen.name!r})",
        )
    refuse_unknown_batch(chosen, chosen.name)
    if total_steps is None:
        refuse_shares(chosen, chosen.name)
    else:
        chosen = resolve_moments(chosen, total_steps)
    if chosen.overrides("update"):
        _add_to(optimizer, chosen)
    if model is not None and chosen.overrides("model", "change_forward"):
        _change(model, chosen)
        if optimizer is not None:
            _train_new_parameters(model, optimizer)
            chosen.hook_steps(model, optimizer)
    if Claim.WEIGHT_MASKS in chosen.claims and isinstance(optimizer, TechniqueOptimizer):
        optimizer.apply_constraints()  # the first forward pass is under the masks
    return target


def technique_of(technique: str | Technique | type[Technique], settings: dict[str, Any]) -> Technique:
    """Return a technique by name, class or object, with these settings. Raises UsageError for unknown ones."""
    if isinstance(technique, Technique):
        base, kind = technique, type(technique)
    else:
        base, kind = None, techniques.find(technique) if isinstance(technique, str) else technique
    return build(kind, settings, kind.name, base)


def _refuse_trainer_only(chosen: Technique) -> None:
    if Claim.OPTIMIZER in chosen.claims:
        raise UsageError(
            f"{chosen.name} is an optimizer", fix=f"optimizer = thrifty.optim.{type(chosen).__name__}(model)"
        )
    required = [seam for seam in SEAMS if seam not in chosen.optional_seams]
    trainer_only = [SEAMS[seam] for seam in required if chosen.overrides(seam)]
    if trainer_only:
        raise NeedsTrainer(
            f"{chosen.name} changes {' and '.join(trainer_only)}, which a loop of your own does not hand over",
            fix=f"thrifty.train(model=…, data=…, techniques=[{chosen.name!r}])",
        )


def _add_to(optimizer: Optimizer, chosen: Technique) -> None:
    if not isinstance(optimizer, TechniqueOptimizer):
        raise UsageError(
            f"{chosen.name} changes the update, and {type(optimizer).__name__} of torch has no place for that",
            fix="use an optimizer of thrifty.optim, such as thrifty.optim.AdamW(model, lr=1e-3)",
        )
    optimizer.add(chosen)


def _change(model: nn.Module, chosen: Technique) -> None:
    if any(map(is_lazy, model.parameters())):
        raise UsageError(
            f"{chosen.name}: the model has lazy layers without weights", fix="run a batch through the model before"
        )
    applied = APPLIED.get(model) or ()
    taken = {claim: each.technique.name for each in applied for claim in each.technique.claims}
    names = [each.technique.name for each in applied]
    if chosen.name in names:
        raise UsageError(f"{chosen.name} is already applied to this model", fix="apply it once")
    for claim in sorted(chosen.claims):
        if claim in taken:
            raise UsageError(f"{taken[claim]} and {chosen.name} both decide the {claim}", fix="apply one of them")
    for claim, reason in chosen.clashes.items():
        if claim in taken:
            raise UsageError(f"{chosen.name} and {taken[claim]} cannot go together: {reason}", fix="apply one of them")
    with collect_notes() as notes:
        chosen.change_forward(model)
        changed = chosen.model(model)
    assert changed is model, f"{chosen.name} replaces the model"
    APPLIED.set(model, (*applied, AppliedTechnique(chosen, tuple(notes))))


def _train_new_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Give the optimizer the parameters that a technique has added, in a group with its default settings."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if new := [pair for pair in model.named_parameters() if pair[1].requires_grad and id(pair[1]) not in known]:
        is_named = "param_names" in optimizer.param_groups[0]
        optimizer.add_param_group({"params": new if is_named else [parameter for _, parameter in new]})


@contextmanager
def activation_budget(model: nn.Module, budget: str | float, **settings: Any) -> Iterator[None]:
    """Limit the activations of the forward passes inside the block; the backward pass may come later.

    `budget` is a percentage ("50%"), a size ("2GB") or a fraction of what all activations take; `settings` are those of
    `ActivationBudget`. The first pass for each shape of inputs is made twice, to learn what a plan needs.

    Raises InfeasibleError for a budget that the blocks do not fit, UsageError for one that is no amount.
    """
    chosen = technique_of("memory.activation_budget", {**settings, "bytes": _amount(budget)})
    current = next((each.technique for each in APPLIED.get(model) or () if each.technique.name == chosen.name), None)
    if current is None:
        _change(model, chosen)
        del model.forward  # only inside the block
    elif current != chosen:
        raise UsageError(f"{chosen.name} is already applied to this model: {current}", fix="use the same settings")
    own = vars(model).get("forward")
    chosen.change_forward(model)
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def _amount(budget: str | float) -> float:
    if isinstance(budget, str) and budget.strip().endswith("%"):
        with suppress(ValueError):
            return float(budget.strip()[:-1]) / 100
    elif isinstance(budget, str):
        return read_size(budget, "budget")
    else:
        return float(budget)
    raise UsageError(f"the budget {budget!r} is no amount", fix='"50%", "2GB" or 0.5')


@dataclass(frozen=True)
class ModelSummary:
    """Parameters of a model, and what each technique touched and skipped."""

    parameters: int
    trainable: int
    applied: tuple[AppliedTechnique, ...]

    def __str__(self) -> str:
        share = self.trainable / self.parameters if self.parameters else 0.0
        lines = [f"{self.parameters:,} parameters, {self.trainable:,} trainable ({share:.2%})"]
        for each in self.applied:
            lines += [each.technique.name, *(f"  {note}" for note in each.notes)]
        return "\n".join(lines)

    __repr__ = __str__


def summary(model: nn.Module) -> ModelSummary:
    """Return the number of parameters, the trainable ones, and what each applied technique touched and skipped."""
    parameters = list(model.parameters())
    trainable = sum(each.numel() for each in parameters if each.requires_grad)
    return ModelSummary(sum(each.numel() for each in parameters), trainable, APPLIED.get(model) or ())
