"""Attention modules of transformers, and the replacement of their attention.

Models of transformers look up their attention function by a name in their config. Thrifty registers a function under
the name `INTERFACE`; this function calls the module's core.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, class_name
from thrifty.modeling.attention_calls import LOOKUP, looks_up_function
from thrifty.modeling.attention_cores import (
    LATER_HIDDEN,
    AttentionCore,
    AttentionSite,
    call_core,
    has_values,
    hides_later_keys,
    visible_and_bias,
)

INTERFACE = "thrifty"
"""Name of Thrifty's attention function in transformers."""
FURTHER = ("softcap", "s_aux", "sinks")
"""Arguments of some attention functions of transformers that cores do not support."""


@dataclass(frozen=True)
class TransformersSite(AttentionSite):
    whole: nn.Module
    """Model of transformers that contains the module."""

    def put(self, core: AttentionCore) -> None:
        _register()
        self.whole.plain_attention = self.implementation  # type: ignore[assignment]
        self.whole.set_attn_implementation(INTERFACE)  # type: ignore[operator]
        if self.module.config._attn_implementation != INTERFACE:  # type: ignore[union-attr]
            raise RefusedError(
                f"{class_name(self.whole)} did not change the attention function of {self.name}",
                fix=f"pip install -U transformers; or choose a model that looks it up in {LOOKUP}",
            )
        self.module.thrifty_core = core

    @property
    def has_causal_masks(self) -> bool:
        return False

    @property
    def implementation(self) -> str:
        """Name of the model's original attention function in transformers, also while Thrifty's function is active."""
        name = self.whole.config._attn_implementation  # type: ignore[union-attr]
        return self.whole.plain_attention if name == INTERFACE else name  # type: ignore[return-value]

    @property
    def current(self) -> AttentionCore:
        return getattr(self.module, "thrifty_core", None) or self.plain

    def take_away(self) -> None:
        """Restore the original core. If no replaced core remains in the model, also restore the model's attention
        function."""
        if hasattr(self.module, "thrifty_core"):
            del self.module.thrifty_core
            if LATER_HIDDEN.get(self.module):
                LATER_HIDDEN.remove(self.module)
            if not any(hasattr(module, "thrifty_core") for module in self.whole.modules()):
                self.whole.set_attn_implementation(self.implementation)  # type: ignore[operator]


def looks_up_attention(module: nn.Module) -> bool:
    """Return True for a self-attention module of transformers that looks up its attention function."""
    config = getattr(module, "config", None)
    return (
        hasattr(config, "_attn_implementation")
        and isinstance(getattr(module, "is_causal", None), bool)
        and not getattr(module, "is_cross_attention", False)
        and looks_up_function(type(module))
    )


@cache
def _register() -> None:
    """Register Thrifty's attention in transformers, with the mask function of SDPA. This function creates no mask if
    causality alone suffices."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers with the module's core, or with torch's attention if the module has no
    core."""
    core = getattr(module, "thrifty_core", None)
    if core is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )  # type: ignore[return-value]
    if more := [name for name in FURTHER if options.get(name) is not None]:
        raise RefusedError(
            f"{type(module).__name__} requires an attention with {', '.join(more)}",
            fix=f"choose a model without {' and '.join(more)}",
        )
    t = query.shape[2]
    if attention_mask is None and module.is_causal and t > 1:  # further keys are empty places of a static cache
        key, value = key[:, :, :t], value[:, :, :t]
    if attention_mask is None:
        attention_mask = _causality(module, query, key, options.get("is_causal"))
    mask, bias = (None, None) if attention_mask is None else visible_and_bias(attention_mask)
    if mask is not None and mask.shape[-1] == t and has_values(mask) and (technique := LATER_HIDDEN.get(module)):
        _refuse_later_keys(technique, module, mask)
    if (positions := options.get("position_bias")) is not None:
        bias = positions if bias is None else bias + positions
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    out = call_core(core, query, key, value, mask, dropout, bias)
    return out.transpose(1, 2).contiguous(), None


def _refuse_later_keys(technique: str, module: nn.Module, mask: Tensor) -> None:
    if not hides_later_keys(mask):
        raise RefusedError(
            f"{technique} hides later tokens, but {class_name(module)} attends to some, such as patches of an image",
            fix=f"--without {technique} --with attention.tiled",
        )


def _causality(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None) -> Tensor | None:
    """Return the causal mask (1, 1, t, s) for a causal call of a non-causal module; None if no mask is required."""
    if is_causal is None or bool(is_causal) == bool(getattr(module, "is_causal", False)):
        return None
    if not is_causal:
        raise RefusedError(
            f"{type(module).__name__} is causal, but is called with is_causal=False", fix="choose another model"
        )
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
