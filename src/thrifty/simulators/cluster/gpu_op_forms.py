"""GPU versions of operations for tracing on a CPU, because a CPU decomposes some operations differently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def use_gpu_ops(flash: bool) -> Iterator[None]:
    """Within the context, replace functions of `torch.nn.functional` by their GPU versions.

    Dropout saves a mask of bytes, an RMS norm is one kernel, and attention saves scores only without `flash`.
    """
    kernel = F.scaled_dot_product_attention
    replacements = {"scaled_dot_product_attention": partial(_attention, kernel if flash else None)}
    replacements |= {"dropout": _dropout, "rms_norm": _rms_norm}
    before = {name: getattr(F, name) for name in replacements}
    for name, function in replacements.items():
        setattr(F, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return a layer norm in place of an RMS norm, because both read, write and save the same number of bytes."""
    return torch.native_layer_norm(x, shape, weight, None, eps or 0.0)[0]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _attention(
    flash: Callable[..., Tensor] | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the output of attention. `flash` runs without dropout and mask, because CPU kernels with dropout or a mask
    save scores; GPU flash kernels save none.
    """
    if flash is not None:
        return flash(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(scores.softmax(-1), dropout_p) @ value
