"""A new run from an old one's state: what has the same name and shape is taken over, the rest starts fresh."""

from collections.abc import Mapping

from torch import Tensor

from thrifty.composition.compose import Run
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.state import TrainState, fill_tensor
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import SLOT
from thrifty.training import checkpoint

OF_THE_OLD_RUN = ("best_held_out_loss", "best_saved_loss")
"""Counters that say nothing of a run with another recipe."""


def copy_matching_state(run: Run, state: TrainState, stored: checkpoint.FoundCheckpoint, *, rewound: bool) -> list[str]:
    """Fills the state of a new run with what a checkpoint holds and says what came of it. A run that is rewound has
    masks of its own, and nothing else of it starts fresh for that.

    Raises UsageError where the new recipe promises what the old state does not keep.
    """

    def own(name: str) -> bool:
        return rewound and _is_mask(name)

    loaded = checkpoint.load(stored.path.parent, stored.step).tensors
    tensors = {name: tensor for name, tensor in loaded.items() if not own(name)}
    _fill(state.tensors(), tensors)
    # once more, since what starts fresh (masks, averages) starts from the weights that were taken over
    assert state.model is not None
    state.optimizer = TransformOptimizer(state.model.named_parameters(), run.transform())
    fresh = [name for name in _fill(state.tensors(), tensors) if not own(name)]
    state.load_scalars(stored.scalars)
    for name in OF_THE_OLD_RUN:
        state.counters.pop(name, None)
    if any(name.startswith("optimizer/") for name in fresh):
        state.optimizer.born = state.optimizer.updates
    state.optimizer.apply_constraints()
    try:
        run.verify(state)
    except IntegrityError as broken:
        raise UsageError(
            f"the changed recipe promises what the old state does not keep: {broken.what}",
            fix="leave that technique out of the fork, or start a new run with it",
        ) from None
    taken = f"{'rewound to' if rewound else 'forked from'} {stored.path} at step {stored.step}"
    return [*stored.notices, taken + (f"; {len(fresh)} tensors start fresh, such as {fresh[0]}" if fresh else "")]


def _is_mask(name: str) -> bool:
    """Whether a tensor of a state is the mask of a weight."""
    return name.startswith("optimizer/") and name.split("/")[1].endswith(SLOT)


def _fill(tensors: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> list[str]:
    """Fills tensors with what was found by the same name and shape; the names of the rest."""
    fresh = []
    for name, tensor in tensors.items():
        if name in loaded and loaded[name].shape == tensor.shape:
            fill_tensor(tensor, loaded[name])
        else:
            fresh.append(name)
    return fresh
