"""Transfer of a training state to another model structure."""

from collections.abc import Mapping

import torch
from torch import Tensor

from thrifty.core.state import TrainState
from thrifty.core.structural_change import StructuralChange
from thrifty.distributed.stage_communication import gather_over_stages
from thrifty.optim.moment_formats import fill_moment, is_scales, opened


def transfer_state(change: StructuralChange, old: Mapping[str, Tensor], placed: TrainState) -> None:
    """Fill the state `placed`, which has the new structure, with values of the old state. `old` has whole tensors, by
    names as in `TrainState.tensors`."""
    assert placed.optimizer is not None
    tensors, slot_kind = placed.tensors(), placed.optimizer.site.slot_kind
    sources = {name: source for name in tensors if (source := _source(change, name, tensors[name], placed))}
    gathered = gather_over_stages(old, set(sources.values()))
    for name, source in sources.items():
        if source in gathered and not is_scales(name):
            value = opened(source, gathered, slot_kind)
            fill_moment(name, tensors, _carried(change, name, value, tensors[name].shape, placed), slot_kind)


def _parts(name: str) -> tuple[str, str, str]:
    kind, _, rest = name.partition("/")
    slot, _, parameter = rest.rpartition("/")
    return kind, slot, parameter


def _source(change: StructuralChange, name: str, tensor: Tensor, placed: TrainState) -> str:
    """Return the name of the old tensor whose value a new tensor takes; "" if it keeps its initial value."""
    kind, slot, parameter = _parts(name)
    # a mask is not a moment: it is transferred with the weight for every setting of `moments`
    is_moment = kind == "optimizer" and tensor.dtype != torch.bool
    origin = change.origin(parameter)
    if kind == "techniques" or origin is None or (is_moment and change.moments == "reset"):
        return ""
    if kind == "parameters" and change.average and change.adds(parameter):
        assert placed.optimizer is not None
        if parameter in placed.optimizer.names:  # a frozen parameter has no average
            (average,) = (each for each in placed.optimizer.slots if each.endswith(change.average))
            return f"optimizer/{average}/{origin}"
    return "/".join(part for part in (kind, slot, origin) if part)


def _carried(change: StructuralChange, name: str, value: Tensor, shape: torch.Size, placed: TrainState) -> Tensor:
    kind, slot, parameter = _parts(name)
    if value.shape != shape:
        value = change.resize(parameter, value, shape)
    content = "weights" if kind == "parameters" else ""
    if kind == "optimizer" and value.numel() and value.is_floating_point():
        assert placed.optimizer is not None
        content = placed.optimizer.site.slot_kind(slot)
    if content in ("weights", "differences"):
        return change.value(parameter, value)
    if content == "squares" and change.moments == "mean" and change.adds(parameter):
        seen = value[value > 0].float()  # masked elements are 0 and do not count
        return torch.full_like(value, float(seen.mean()) if seen.numel() else 0.0)
    return value
