"""FLOPs and result shapes of operations that torch's own registries lack."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from thrifty.core.kernel_workspace import with_kept_gates


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *others: Any, **options: Any) -> int:
    """Return FLOPs of scores and weighted values. A causal mask does not reduce the FLOPs."""
    b, h, t, k = query
    return 2 * b * h * t * key[2] * (k + value[3])


def _attention_backward_flops(
    output_gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *others: Any, **options: Any
) -> int:
    """Return FLOPs of the recomputed scores, and of two matrix products for each of the two products in the forward
    pass."""
    b, h, t, k = query
    return 2 * b * h * t * key[2] * (3 * k + 2 * value[3])


def _grouped_flops(a: torch.Size, b: torch.Size, *others: Any, **_: Any) -> int:
    products = a[0] if len(a) == len(b) == 3 else 1  # else groups divide the rows, the columns or the summed dim
    return 2 * products * a[-2] * a[-1] * b[-1]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
FLOPS_OF = {
    **flop_registry,
    torch.ops.aten._grouped_mm: shape_wrapper(_grouped_flops),
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}"): shape_wrapper(formula)
        for kernel in _KERNELS
        for suffix, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
    },
}
"""FLOP formulas of torch, and formulas for kernels that torch omits or, with shared key heads, counts wrongly."""


def call_operation(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation that a dispatch mode received. The results of two fake kernels of torch are corrected. The fake
    grouped matmul (mixture of experts) accepts only bfloat16, unlike the real kernel. The fake recurrent layer returns
    no saved gates."""
    if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        return _grouped_product(*args, **kwargs)
    results = func(*args, **kwargs)
    return with_kept_gates(func, args, kwargs, results) if isinstance(results, tuple) else results


def traced_device(func: Callable[..., Any], args: tuple) -> torch.device | None:
    """Return the device if the operation only reads a fake tensor's device, torch's most frequent call; else None."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return a fake result of a grouped matmul with e groups. The groups divide the rows in (m, k) @ (e, k, n), the
    columns in (e, m, k) @ (k, n), and the summed dim in (m, k) @ (k, n). (e, m, k) @ (e, k, n) is one matmul per group.
    """
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim == 2:
        assert offs is not None
        shape: tuple[int, ...] = (len(offs), rows, columns)
    else:
        shape = (rows, columns) if 2 in (a.ndim, b.ndim) else (len(a), rows, columns)
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
