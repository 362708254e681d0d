"""Communication between pipeline stages: tensors from stage to stage, and values for all stages.

Each tensor is sent after a header with its dtype and shape, so that the receiver does not need to know both in advance.
All stages of a process group make the same calls in the same order.
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
    """Send a tensor to the pipeline rank `place`."""
    group = axis("pipeline").group
    dist.send(_header(tensor), group=group, group_dst=place)
    dist.send(tensor.contiguous(), group=group, group_dst=place)


def receive(place: int, device: torch.device) -> Tensor:
    group = axis("pipeline").group
    header = torch.empty(_DIMS + 2, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=place)
    tensor = _empty(header, device)
    dist.recv(tensor, group=group, group_src=place)
    return tensor


def broadcast_from_stage(tensor: Tensor | None, place: int, device: torch.device) -> Tensor:
    """Return the tensor of the pipeline rank `place` on all ranks. Tensors of other ranks are ignored."""
    here = axis("pipeline")
    if here.place == place:
        assert tensor is not None
        header, tensor = _header(tensor), tensor.contiguous()
        dist.broadcast(header, group=here.group, group_src=place)
    else:
        header = torch.empty(_DIMS + 2, dtype=torch.int64, device=device)
        dist.broadcast(header, group=here.group, group_src=place)
        tensor = _empty(header, device)
    dist.broadcast(tensor, group=here.group, group_src=place)
    return tensor


def merge_over_stages(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged dictionaries `facts` of all stages. Values must be JSON values."""
    stages, text = axis("pipeline"), json.dumps(dict(facts)).encode()
    if stages.size == 1:
        return dict(facts)
    known = map(json.loads, gather_bytes(text, stages.group, torch.device("cpu")))  # JSON ignores trailing padding
    return {name: value for facts in known for name, value in facts.items()}


def gather_over_stages(values: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors `wanted` of any stage, by name. Names that no stage has are left out."""
    stages = axis("pipeline")
    if stages.size == 1:
        return {name: values[name] for name in wanted if name in values}
    holders = merge_over_stages(dict.fromkeys(values, stages.place))
    requested = merge_over_stages(dict.fromkeys(wanted, True))
    device = next(iter(values.values())).device
    gathered = {}
    for name in sorted(requested.keys() & holders.keys()):
        value = broadcast_from_stage(values.get(name), holders[name], device)
        if name in wanted:
            gathered[name] = value
    return gathered


def _header(tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    header = [_DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (_DIMS - len(shape))]
    return torch.tensor(header, device=tensor.device)


def _empty(header: Tensor, device: torch.device) -> Tensor:
    dtype, dims, *shape = header.tolist()
    return torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
