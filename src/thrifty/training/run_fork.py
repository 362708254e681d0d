"""Fork of a run: tensors that both runs have are copied. Tensors that only the new run has are initialized; tensors
that only the old run has are left out."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from thrifty.composition.compose import Run
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.state import TrainState
from thrifty.optim.moment_formats import SlotKind, fill_moment, is_scales, opened, opened_dtype
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import SLOT
from thrifty.training import checkpoint
from thrifty.training.judged_measure import BEST, WITHOUT_GAIN

WEIGHTS = "parameters/"
OF_THE_OLD_RUN = ("best_held_out_loss", "best_saved_loss", BEST, WITHOUT_GAIN)
"""Counters that a fork resets, because they describe the old recipe."""


def copy_matching_state(
    run: Run, state: TrainState, stored: checkpoint.FoundCheckpoint, *, rewound: bool, drop_weights: bool = False
) -> list[str]:
    """Fill the state of a new run from a checkpoint and return notices. A rewound run uses its own masks; the old
    moments are copied although they belong to the old masks. Raise UsageError if the old state violates a promise of
    the new recipe. Raise UsageError if the new model lacks parameters of the old model, unless `drop_weights`."""
    assert state.model is not None and state.optimizer is not None
    loaded = checkpoint.load(stored.path.parent, stored.step).tensors
    own, slot_kind = state.tensors(), state.optimizer.site.slot_kind
    tensors = {
        name: opened(name, loaded, slot_kind) if name in own else tensor
        for name, tensor in loaded.items()
        if not is_scales(name) and not (rewound and _is_mask(name))
    }
    dropped = [name for name in tensors if not _is_alike(name, own, tensors)]
    dropped.sort(key=lambda name: not name.startswith(WEIGHTS))
    _refuse_lost_weights([name for name in dropped if name.startswith(WEIGHTS)], stored, drop_weights)
    _fill(own, tensors, slot_kind)
    # a second time, since fresh tensors (masks, averages) start from the copied weights
    state.optimizer = TransformOptimizer(state.model.named_parameters(), run.transform())
    state.load_scalars(stored.scalars)
    own = state.tensors()
    fresh = _start_fresh(state.optimizer, own, tensors)
    _fill(own, {name: tensor for name, tensor in tensors.items() if name not in fresh}, slot_kind)
    for name in OF_THE_OLD_RUN:
        state.counters.pop(name, None)
    state.optimizer.apply_constraints()
    try:
        run.verify(state)
    except IntegrityError as broken:
        raise UsageError(
            f"the old state breaks a promise of the changed recipe: {broken.what}",
            fix="leave that technique out of the fork; or start a new run with it",
        ) from None
    origin = f"{'rewound to' if rewound else 'forked from'} {stored.path} at step {stored.step}"
    fresh_names = [name for name in own if name in fresh and not (rewound and _is_mask(name))]
    counts = [_counted(fresh_names, "start fresh"), _counted(dropped, "are left out")]
    return [*stored.notices, "; ".join([origin, *filter(None, counts)])]


def _start_fresh(optimizer: TransformOptimizer, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors that start with new values, and set the ages of their optimizer elements to 0. An
    element is one transform of the optimizer and has a single age. If some parameters of an element are new, all its
    moments start with new values. With the old age, the first updates of the new parameters would be several times too
    large."""
    names = [name for name in own if not is_scales(name)]
    fresh = {name for name in names if not _is_alike(name, own, tensors)}
    elements: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("optimizer/") and not _is_mask(name):
            elements.setdefault(optimizer.site.owner(_slot(name)), []).append(name)
    for path, names in elements.items():
        moments = [name for name in names if optimizer.site.slot_kind(_slot(name)) != "weights"]
        if fresh.issuperset(names) or not fresh.isdisjoint(moments):
            fresh |= {*names}
            optimizer.births[path] = optimizer.updates
    return fresh


def _refuse_lost_weights(names: Sequence[str], stored: checkpoint.FoundCheckpoint, dropped: bool) -> None:
    if names and not dropped:
        first = names[0].removeprefix(WEIGHTS)
        raise UsageError(
            f"the changed recipe lacks {len(names)} parameters of '{stored.path}', such as {first!r}: their "
            "trained values would be lost",
            fix="keep the technique of these parameters; or drop them: --drop-weights",
        )


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names)} tensors {what}, such as {names[0]}" if names else ""


def _slot(name: str) -> str:
    return name.split("/")[1]


def _is_mask(name: str) -> bool:
    return name.startswith("optimizer/") and _slot(name).endswith(SLOT)


def _is_alike(name: str, own: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> bool:
    """Return True if the values can be copied: floating-point tensors between any formats, masks in the same format."""
    if name not in own or name not in loaded or loaded[name].shape != own[name].shape:
        return False
    formats = {opened_dtype(name, own), loaded[name].dtype}
    return len(formats) == 1 or all(dtype.is_floating_point for dtype in formats)


def _fill(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor], slot_kind: SlotKind) -> None:
    for name, tensor in loaded.items():
        if _is_alike(name, own, loaded):
            fill_moment(name, own, tensor, slot_kind)
