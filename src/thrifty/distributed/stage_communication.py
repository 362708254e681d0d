"""Tensors on their way between pipeline stages, and values that all stages must know.

A tensor travels behind a line that says its dtype and shape, so that whoever receives it need not know them. Stages of
one process group take the same steps in the same order.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thrifty.core.mesh import axis
from thrifty.core.ranks import gather_bytes

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
_DIMS = 6


def send(tensor: Tensor, place: int) -> None:
    """To the stage at this place along the pipeline."""
    group = axis("pipeline").group
    dist.send(_described(tensor), group=group, group_dst=place)
    dist.send(tensor.contiguous(), group=group, group_dst=place)


def receive(place: int, device: torch.device) -> Tensor:
    group = axis("pipeline").group
    line = torch.empty(_DIMS + 2, dtype=torch.int64, device=device)
    dist.recv(line, group=group, group_src=place)
    tensor = _empty(line, device)
    dist.recv(tensor, group=group, group_src=place)
    return tensor


def broadcast_from_stage(tensor: Tensor | None, place: int, device: torch.device) -> Tensor:
    """The tensor of the stage at this place, on all stages; what the others give does not matter."""
    here = axis("pipeline")
    if here.place == place:
        assert tensor is not None
        line, tensor = _described(tensor), tensor.contiguous()
        dist.broadcast(line, group=here.group, group_src=place)
    else:
        line = torch.empty(_DIMS + 2, dtype=torch.int64, device=device)
        dist.broadcast(line, group=here.group, group_src=place)
        tensor = _empty(line, device)
    dist.broadcast(tensor, group=here.group, group_src=place)
    return tensor


def merge_over_stages(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What all stages know by name, taken together: plain values, which travel as JSON."""
    stages, text = axis("pipeline"), json.dumps(dict(facts)).encode()
    if stages.size == 1:
        return dict(facts)
    known = map(json.loads, gather_bytes(text, stages.group, torch.device("cpu")))  # blanks mean nothing in JSON
    return {name: value for facts in known for name, value in facts.items()}


def gather_over_stages(values: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors of these names, whichever stage has them; names that none has are left out."""
    stages = axis("pipeline")
    if stages.size == 1:
        return {name: values[name] for name in wanted if name in values}
    holders = merge_over_stages(dict.fromkeys(values, stages.place))
    asked = merge_over_stages(dict.fromkeys(wanted, True))
    device = next(iter(values.values())).device
    gathered = {}
    for name in sorted(asked.keys() & holders.keys()):
        value = broadcast_from_stage(values.get(name), holders[name], device)
        if name in wanted:
            gathered[name] = value
    return gathered


def _described(tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    line = [_DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (_DIMS - len(shape))]
    return torch.tensor(line, device=tensor.device)


def _empty(line: Tensor, device: torch.device) -> Tensor:
    dtype, dims, *shape = line.tolist()
    return torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
