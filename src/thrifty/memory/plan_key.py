"""Key of a memory plan: everything except values that decides which tensors a forward pass saves."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor, nn


def plan_key(model: nn.Module, inputs: Iterable[Tensor]) -> Hashable:
    """Return a key that differs between forward passes with different saved tensors.

    It contains shapes and dtypes of `inputs`, the trained parameters, the training mode of all modules, and autocast.
    """
    inputs = list(inputs)
    kinds = sorted({tensor.device.type for tensor in inputs} - {"meta"})
    return (
        tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs),
        tuple((parameter.dtype, parameter.requires_grad) for parameter in model.parameters()),
        tuple(module.training for module in model.modules()),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )
