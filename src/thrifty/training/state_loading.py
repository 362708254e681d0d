"""The state of a run as a checkpoint holds it, loaded into a run over the same or over other ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from thrifty.core.state import TrainState
from thrifty.optim.moment_formats import fill_moment, is_scales, opened, scales_name
from thrifty.training import checkpoint
from thrifty.training.checkpoint_writer import tensor_files
from thrifty.training.rank_sync import SingleProcess
from thrifty.training.sharded_safetensors import StoredTensorBoxes


def load_state(state: TrainState, saved: checkpoint.FoundCheckpoint, ranks: SingleProcess | None = None) -> None:
    """Load a checkpoint into a state, bit for bit. Only 8-bit moments whose blocks do not fit this mesh are dequantized
    and quantized again. Raises the errors of `checkpoint.fill`."""
    assert state.optimizer is not None
    own, stored = state.tensors(), StoredTensorBoxes(tensor_files(saved.path))
    other = [name for name in own if _is_in_other_codes(name, own, stored)]
    besides = {*other, *map(scales_name, other)}
    into = {name: tensor for name, tensor in own.items() if name not in besides}
    checkpoint.fill(saved, into, ranks=ranks, besides=besides)
    slot_kind = state.optimizer.site.slot_kind
    for name in other:
        parts = {part: stored.full(part) for part in (name, scales_name(name)) if part in stored.pieces}
        fill_moment(name, own, opened(name, parts, slot_kind), slot_kind)
    state.load_scalars(saved.scalars)


def _is_in_other_codes(name: str, own: Mapping[str, Tensor], stored: StoredTensorBoxes) -> bool:
    if not name.startswith("optimizer/") or is_scales(name) or name not in stored.pieces:
        return False
    there, scales = stored.pieces[name][0], stored.pieces.get(scales_name(name))
    own_scales = own.get(scales_name(name))
    if torch.uint8 not in (own[name].dtype, there.dtype) or tuple(own[name].shape) != there.box.full:
        return False
    return (own_scales is None or tuple(own_scales.shape)) != (scales is None or scales[0].box.full)
