"""Techniques in a user's own training loop: `apply`, `merge` and `activation_budget`."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
from thrifty.interface.changed_loader import change_data
from thrifty.modeling.adapter_base import AdapterTechnique
from thrifty.modeling.module_surgery import refuse_copies
from thrifty.optim.mask_selection import masked_shapes
from thrifty.optim.weight_masks import MaskPolicy
from thrifty.recipes.recipe_layers import toml_table

T = TypeVar("T")

SEAMS = {
    "batches": "the data",
    "objective": "the loss",
    "backward": "how gradients are computed",
    "changes": "the structure of the model during training",
}
"""Parts of a run that only the trainer controls, by the technique method that changes the part."""


@dataclass(frozen=True)
class AppliedTechnique:
    technique: Technique
    notes: tuple[str, ...]


MANY_STEPS = 1_000_000
"""Assumed number of steps of a loop without `total_steps`."""

APPLIED: ModuleNote[tuple[AppliedTechnique, ...]] = ModuleNote("applied")


def apply(
    target: T, technique: str | Technique | type[Technique], *, total_steps: int | None = None, **settings: Any
) -> T:
    """Apply a technique to a model, an optimizer or a pair of both, and return the same objects. For a DataLoader or
    dataset, return a replacement.

    Args:
        target: Model, optimizer, (model, optimizer), DataLoader or dataset.
        technique: Name ("lora" or "adapters.lora"), object or class. `settings` are the fields of the technique.
        total_steps: Number of steps of the loop, or of batches for a DataLoader. It is required if a setting is a
            fraction of the run.

    Parameters keep their names. Call `apply` before `torch.compile`, `DistributedDataParallel` and `fully_shard`.

    Warns if an effect of the technique never occurs within `total_steps`. Raises NeedsTrainer if the technique works
    only in the trainer. Raises UsageError if a name or setting is unknown, and RefusedError if the technique does not
    support the model.

    Example::

        model = thrifty.apply(model, "lora", rank=8)
        optimizer = thrifty.optim.AdamW(model, lr=1e-3)
        loader = thrifty.apply(loader, "sequence_length", total_steps=1000)
    """
    chosen = technique_of(technique, settings)
    model, optimizer = target if _is_pair(target) else (target, target)
    model = model if isinstance(model, nn.Module) else None
    optimizer = optimizer if isinstance(optimizer, Optimizer) else None
    is_data = model is None and optimizer is None
    if (is_data and not (isinstance(target, Iterable) or hasattr(target, "__getitem__"))) or isinstance(target, str):
        raise UsageError(
            f"thrifty.apply requires a model, an optimizer, a pair of both or data, not {type(target).__name__!r}",
            fix=f"thrifty.apply(model, {chosen.name!r})",
        )
    if model is not None and optimizer is not None:
        _refuse_stranger(model, optimizer)
    _refuse_trainer_only(chosen)
    _refuse_other_target(chosen, model is not None, optimizer is not None, is_data)
    batch = (getattr(target, "batch_size", None) or 0) if is_data else 0
    if total_steps is None:
        refuse_shares(chosen, chosen.name)
    chosen = resolve_moments(chosen, total_steps or 0, batch)
    refuse_unknown_batch(chosen, chosen.name)
    if idle := chosen.idle_in(total_steps or MANY_STEPS):
        loop = f"a loop of {total_steps:,} steps" if total_steps else "any loop"
        warnings.warn(f"{chosen.name}: {idle} in {loop} with {chosen}", stacklevel=2)
    if is_data:
        return change_data(target, chosen)
    if model is not None:
        _refuse_wrapped(model, chosen)
    _refuse_together(chosen, model, optimizer)
    if chosen.overrides("update"):
        _add_to(optimizer, chosen, model)
    if model is not None and chosen.overrides("model", "change_forward"):
        trained = [ref(parameter) for parameter in model.parameters() if parameter.requires_grad]
        _change(model, chosen, optimizer)
        if optimizer is not None:
            _train_new_parameters(model, optimizer, trained)
            if chosen.overrides("hook_steps"):
                chosen.hook_steps(model, optimizer)
                refuse_copies(model, chosen.name)
    if Claim.WEIGHT_MASKS in chosen.claims and isinstance(optimizer, TechniqueOptimizer):
        optimizer.apply_constraints()  # so that the first forward pass uses masked weights
    return target


def _is_pair(target: object) -> TypeGuard[tuple[nn.Module, Optimizer]]:
    return isinstance(target, tuple) and [isinstance(each, nn.Module | Optimizer) for each in target] == [True, True]


def technique_of(technique: str | Technique | type[Technique], settings: dict[str, Any]) -> Technique:
    """Return a technique from its name, class or object, with these settings. A name may include settings, as in
    "lora:rank=8,alpha=16". Raise UsageError if the name or a setting is unknown.
    """
    if isinstance(technique, str):
        technique, colon, typed = technique.partition(":")
        settings = {**(toml_table(typed, f"{technique}:{typed}", "technique") if colon else {}), **settings}
    if isinstance(technique, Technique):
        base, kind = technique, type(technique)
    else:
        base, kind = None, techniques.find(technique) if isinstance(technique, str) else technique
        if not (isinstance(kind, type) and issubclass(kind, Technique)):
            given = (technique if isinstance(technique, type) else type(technique)).__name__
            what = f"a technique is a '{given}', not a thrifty.Technique, its class or its name"
            raise UsageError(what, fix="techniques=[thrifty.AdamW(lr=1e-3)]")
    return build(kind, settings, kind.name, base)


def _refuse_stranger(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            "the optimizer contains no parameter of the model",
            fix=f"{type(optimizer).__name__}(model.parameters(), …)",
        )


def _refuse_trainer_only(chosen: Technique) -> None:
    if Claim.OPTIMIZER in chosen.claims:
        raise UsageError(
            f"{chosen.name} is an optimizer", fix=f"optimizer = thrifty.optim.{type(chosen).__name__}(model)"
        )
    trainer_only = [seam for seam in SEAMS if seam not in chosen.optional_seams and chosen.overrides(seam)]
    if trainer_only == ["batches"] and (not chosen.overrides("model") or "model" in chosen.optional_seams):
        return
    if trainer_only:
        raise NeedsTrainer(
            f"{chosen.name} changes {' and '.join(SEAMS[seam] for seam in trainer_only)}, which only "
            "thrifty.train controls",
            fix=f"thrifty.train(model=…, data=…, techniques=[{chosen.name!r}])",
        )


def _refuse_other_target(chosen: Technique, has_model: bool, has_optimizer: bool, is_data: bool) -> None:
    """Raise UsageError if the technique changes a different kind of object than the target."""

    def required(*seams: str) -> bool:
        return any(chosen.overrides(seam) for seam in set(seams) - chosen.optional_seams)

    changes_data, changes_update = required("batches"), required("update", "hook_steps")
    changes_model = required("model", "change_forward") and not changes_data
    is_given = is_data == changes_data and (has_model or not changes_model) and (has_optimizer or not changes_update)
    if not is_given or not (changes_data or changes_model or changes_update):
        words = ["loader" * changes_data, "model" * changes_model, "optimizer" * changes_update]
        wanted = [word for word in words if word]
        target = f"({', '.join(wanted)})" if len(wanted) > 1 else "".join(wanted)
        raise UsageError(
            f"{chosen.name} changes {' and '.join(f'the {word}' for word in wanted) or 'no part of a loop'}",
            fix=f"thrifty.apply({target}, {chosen.name!r})",
        )


def _refuse_together(chosen: Technique, model: nn.Module | None, optimizer: Optimizer | None) -> None:
    """Raise UsageError if two techniques have the same claim, cannot be combined, or are applied in the wrong order."""
    before = [each.technique for each in APPLIED.get(model) or ()]
    in_update = optimizer.techniques if isinstance(optimizer, TechniqueOptimizer) else ()
    for other in (*before, *in_update):
        if other.name == chosen.name:
            raise UsageError(f"{chosen.name} is already applied", fix="apply it once")
        for claim in sorted(chosen.claims & other.claims):
            raise UsageError(f"{other.name} and {chosen.name} both decide the {claim}", fix="apply one of them")
        for one, another in ((chosen, other), (other, chosen)):
            for claim, reason in one.clashes.items():
                if claim in another.claims:
                    raise UsageError(
                        f"{one.name} and {another.name} cannot be combined: {reason}", fix="apply one of them"
                    )
    for other in before if chosen.overrides("model", "change_forward") else ():
        if chosen.stage < other.stage:
            raise UsageError(
                f"{other.name} is already applied, but must come after {chosen.name}",
                fix=f"apply {chosen.name} first",
            )


def _refuse_wrapped(model: nn.Module, chosen: Technique) -> None:
    """Raise UsageError if the model is wrapped so that the wrapper would not include the technique's change."""
    wrappers = {
        "torch.compile": type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None,
        "DistributedDataParallel": isinstance(model, DistributedDataParallel),
        "fully_shard": any(type(each).__name__.startswith("FSDP") for each in model.modules()),
        "torch.jit": isinstance(model, torch.jit.ScriptModule),
    }
    for name, is_wrapped in wrappers.items():
        if is_wrapped:
            raise UsageError(
                f"{chosen.name}: the model is already wrapped in {name}, which would not include the change",
                fix=f"apply it before {name}",
            )


def _add_to(optimizer: Optimizer | None, chosen: Technique, model: nn.Module | None) -> None:
    if not isinstance(optimizer, TechniqueOptimizer):
        raise UsageError(
            f"{chosen.name} changes the update, which torch's {type(optimizer).__name__} does not support",
            fix="use an optimizer of thrifty.optim, such as thrifty.optim.AdamW(model, lr=1e-3)",
        )
    optimizer.add(chosen)
    if model is not None and chosen.needs_names:
        optimizer.rename(model)


def _change(model: nn.Module, chosen: Technique, optimizer: Optimizer | None = None) -> None:
    if any(map(is_lazy, model.parameters())):
        raise UsageError(
            f"{chosen.name}: the model has lazy layers without weights", fix="run the model on one batch first"
        )
    applied = APPLIED.get(model) or ()
    with collect_notes() as notes:
        chosen.change_forward(model)
        changed = chosen.model(model)
    assert changed is model, f"{chosen.name} replaces the model"
    if optimizer is not None and isinstance(chosen, MaskPolicy):
        _refuse_unmasked(model, optimizer, chosen)
    APPLIED.set(model, (*applied, AppliedTechnique(chosen, tuple(notes))))


def _refuse_unmasked(model: nn.Module, optimizer: Optimizer, masking: MaskPolicy) -> None:
    """Raise UsageError if the optimizer lacks a weight that the technique masks."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    if missing := [name for name in masking.masked(masked_shapes(named)) if id(named[name]) not in known]:
        raise UsageError(
            f"{len(missing)} weights that would be masked are not in the optimizer, such as {missing[0]!r}",
            fix=f"optimizer = thrifty.optim.{type(optimizer).__name__}(model.named_parameters()); or set where to a "
            "pattern of trained weights",
        )


def _train_new_parameters(model: nn.Module, optimizer: Optimizer, trained: list[ref[nn.Parameter]]) -> None:
    """Add the parameters that a technique made trainable to the optimizer, as a group with the optimizer's default
    settings. Parameters that were `trained` before stay outside the optimizer if they are."""
    inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = inside | {id(parameter) for each in trained if (parameter := each()) is not None}
    if new := [pair for pair in model.named_parameters() if pair[1].requires_grad and id(pair[1]) not in known]:
        is_named = "param_names" in optimizer.param_groups[0]
        optimizer.add_param_group({"params": new if is_named else [parameter for _, parameter in new]})


def merge(model: nn.Module) -> nn.Module:
    """Merge the adapters of a trained model into its weights, and return the same model.

    Afterwards the `state_dict` has the names and shapes from before `apply`, and all parameters are trainable. Outputs
    are equal up to rounding. Other techniques stay applied. To train further, build a new optimizer, because the old
    optimizer refers to removed parameters.

    Raises UsageError if the model has no adapters, and RefusedError if adapters cannot be merged into weights, such as
    prompts or bottleneck networks.

    Example::

        model = thrifty.apply(model, "lora", rank=4)
        weights = thrifty.merge(model).state_dict()
    """
    inner = getattr(model, "module", None)
    if isinstance(inner, nn.Module) and APPLIED.get(model) is None and APPLIED.get(inner):
        raise UsageError(f"the adapters are inside the wrapper {type(model).__name__}", fix="merge(model.module)")
    applied = APPLIED.get(model) or ()
    adapters = [each for each in applied if isinstance(each.technique, AdapterTechnique)]
    if not adapters:
        raise UsageError("the model has no adapters to merge", fix='model = thrifty.apply(model, "lora")')
    for each in adapters:
        each.technique.finish(model)
        applied = tuple(other for other in applied if other is not each)
        APPLIED.set(model, applied)
    return model


@contextmanager
def activation_budget(model: nn.Module, budget: str | float, **settings: Any) -> Iterator[None]:
    """Limit the memory of activations that are saved by forward passes in the `with` block.

    `budget` is a percentage ("50%") or a fraction of all activations, or a size ("2GB"). `settings` are other settings
    of `ActivationBudget`. The backward pass may run after the `with` block. The first forward pass for each input shape
    runs twice, to measure costs for the plan.

    Raises InfeasibleError if no plan fits the budget, and UsageError if `budget` is not an amount.

    Example::

        with thrifty.activation_budget(model, "80%"):
            losses = loss(model, batch)
        losses.mean().backward()
    """
    chosen = technique_of("memory.activation_budget", {**settings, "bytes": _amount(budget)})
    current = next((each.technique for each in APPLIED.get(model) or () if each.technique.name == chosen.name), None)
    own = vars(model).get("forward")
    if current is None:
        _refuse_wrapped(model, chosen)
        _refuse_together(chosen, model, None)
        _change(model, chosen)
        _put_forward(model, own)  # restored when the block ends
    elif current != chosen:
        raise UsageError(f"{chosen.name} is already applied to this model: {current}", fix="use the same settings")
    chosen.change_forward(model)
    try:
        yield
    finally:
        _put_forward(model, own)


def _put_forward(model: nn.Module, own: Any) -> None:
    """Restore the model's own forward `own`; None restores the forward of the model's class."""
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
    raise UsageError(f"the budget {budget!r} is not an amount", fix='budget="50%", budget="2GB" or budget=0.5')
