"""Compiled library of sparse matmuls, and the condition for its use."""

import torch
from torch import Tensor

from thrifty.kernels.cpp_extension import NativeLibrary
from thrifty.kernels.sparse import sparse_products_cpp, spgemm_cpp

PRODUCTS = NativeLibrary(sparse_products_cpp.SOURCE + spgemm_cpp.SOURCE, "-ffp-contract=fast")


def native(*tensors: Tensor | None) -> bool:
    """Return True if matmuls of these tensors use compiled code: float32 on a CPU, with a compiler."""
    operands = [tensor for tensor in tensors if tensor is not None]
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in operands) and PRODUCTS.is_there()
