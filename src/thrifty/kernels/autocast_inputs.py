"""Cast the inputs of a custom operation as autocast would."""

import torch
from torch import Tensor


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype that products of them are to have, as torch's own attention takes them."""
    device = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
