"""Loading the state of a run from a checkpoint, for any number of ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from thrifty.core.state import TrainState, adopt_buffers
from thrifty.optim.moment_formats import fill_moment, is_scales, opened, scales_name
from thrifty.training import checkpoint
from thrifty.training.checkpoint_writer import tensor_files
from thrifty.training.rank_sync import SingleProcess
from thrifty.training.sharded_safetensors import StoredTensorBoxes


def load_state(state: TrainState, saved: checkpoint.FoundCheckpoint, ranks: SingleProcess | None = None) -> None:
    """Load a checkpoint into a state, bit for bit. The only exception is 8-bit moments whose blocks do not fit this
    mesh: they are dequantized and quantized again. Raise the errors of `checkpoint.fill`."""
    assert state.optimizer is not None
    stored = StoredTensorBoxes(tensor_files(saved.path))
    assert state.model is not None
    adopt_buffers(state.model, {name: (each[0].box.full, each[0].dtype) for name, each in stored.pieces.items()})
    own = state.tensors()
    requantized = [name for name in own if _has_other_quantization(name, own, stored)]
    besides = {*requantized, *map(scales_name, requantized)}
    into = {name: tensor for name, tensor in own.items() if name not in besides}
    checkpoint.fill(saved, into, ranks=ranks, besides=besides)
    slot_kind = state.optimizer.site.slot_kind
    for name in requantized:
        parts = {part: stored.full(part) for part in (name, scales_name(name)) if part in stored.pieces}
        fill_moment(name, own, opened(name, parts, slot_kind), slot_kind)
    state.load_scalars(saved.scalars)


def _has_other_quantization(name: str, own: Mapping[str, Tensor], stored: StoredTensorBoxes) -> bool:
    if not name.startswith("optimizer/") or is_scales(name) or name not in stored.pieces:
        return False
    stored_box, scales = stored.pieces[name][0], stored.pieces.get(scales_name(name))
    own_scales = own.get(scales_name(name))
    if torch.uint8 not in (own[name].dtype, stored_box.dtype) or tuple(own[name].shape) != stored_box.box.full:
        return False
    return (own_scales is None or tuple(own_scales.shape)) != (scales is None or scales[0].box.full)
