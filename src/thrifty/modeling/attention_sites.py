"""Self-attention modules of a model, and the replacement of their attention core.

In Thrifty's models the core is an attribute of the attention module. A core maps q (b, h, t, k), k and v (b, g, s, k)
and an optional mask to (b, h, t, k). Models of transformers look up their attention function by a name in their config.
Thrifty registers a function under the name `INTERFACE`; this function calls the module's core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote

HEAD_WIDTHS = ("qk_head_dim", "head_width", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


AttentionCore = Callable[..., Tensor]
INTERFACE = "thrifty"
"""Name of Thrifty's attention function in transformers."""
HEADS = ("heads", "num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")
"""Attributes of attention modules or configs that store the number of key heads."""
CROSS = ("cross", "encoder_attn", "EncDec")
"""Substrings of module names that identify cross-attention in transformers."""
FURTHER = ("softcap", "s_aux", "position_bias")
"""Arguments of some attention functions of transformers that cores do not support."""


class SwappableCore:
    """An attention core that calls another core, its attribute `core`, which can be replaced at any time. `watch`
    receives the queries, keys and mask of each call."""

    def __init__(self, core: AttentionCore):
        self.core = core
        self.watch: Callable[[Tensor, Tensor, Tensor | None], None] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.watch is not None:
            self.watch(q, k, mask)
        return self.core(q, k, v) if mask is None else self.core(q, k, v, mask)


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model."""

    name: str
    module: nn.Module
    causal: bool
    plain: AttentionCore
    """The original attention core; for a module of transformers, an equivalent core."""
    whole: nn.Module | None = None
    """Model of transformers that contains the module; None for Thrifty's models."""

    @property
    def head_width(self) -> int:
        """Width of a head. Raise RefusedError if the module has no attribute for this width."""
        return self._number(HEAD_WIDTHS, "the width of its heads")

    @property
    def heads(self) -> int:
        """Number of query heads. Raise RefusedError if neither the module nor its config has an attribute for this
        number."""
        return self._number(HEADS, "its number of heads")

    @property
    def key_heads(self) -> int:
        """Number of key heads; by default the number of query heads."""
        return self._number((*KEY_HEADS, *HEADS), "its number of heads")

    def _number(self, names: Sequence[str], what: str) -> int:
        for owner in (self.module, getattr(self.module, "config", None)):
            for name in names:
                if isinstance(number := getattr(owner, name, None), int):
                    return number
        raise RefusedError(f"{self.name} has no attribute for {what}", fix=f"set one of: {', '.join(names)}")

    def put(self, core: AttentionCore) -> None:
        if self.whole is None:
            self.module.core = core
            return
        _register()
        self.whole.plain_attention = self.implementation  # type: ignore[assignment]
        self.whole.set_attn_implementation(INTERFACE)  # type: ignore[operator]
        self.module.thrifty_core = core

    @property
    def implementation(self) -> str:
        """Name of the model's original attention function in transformers, also while Thrifty's function is active."""
        assert self.whole is not None
        name = self.whole.config._attn_implementation  # type: ignore[union-attr]
        return self.whole.plain_attention if name == INTERFACE else name  # type: ignore[return-value]

    def take_away(self) -> None:
        """Restore the original core. If no replaced core remains in a transformers model, also restore the model's
        attention function."""
        if self.whole is None:
            self.module.core = self.plain
        elif hasattr(self.module, "thrifty_core"):
            del self.module.thrifty_core
            if not any(hasattr(module, "thrifty_core") for module in self.whole.modules()):
                self.whole.set_attn_implementation(self.implementation)  # type: ignore[operator]


ATTENTION_SITES: ModuleNote[list[AttentionSite]] = ModuleNote("attention_sites")
"""Note on a model: the sites of its replaced cores."""
LOSING_CORES: ModuleNote[list[Any]] = ModuleNote("losing_cores")
"""Note on a model: cores with an attribute `losses`, which is a list while losses are collected."""


def find_attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the self-attention modules whose plain core can be replaced. Raise RefusedError if the model has none."""
    sites: list[AttentionSite] = []
    whole: nn.Module | None = None
    for name, module in model.named_modules():
        if hasattr(module, "set_attn_implementation"):
            whole = whole or module
        causal = vars(getattr(module, "core", None) or _none).get("is_causal")
        if causal is not None and hasattr(module, "qkv"):
            sites.append(AttentionSite(name, module, bool(causal), module.core))
        elif whole is not None and _is_of_transformers(name, module):
            causal = bool(module.is_causal)
            sites.append(AttentionSite(name, module, causal, partial(_torch_attention, causal), whole))
    if not sites:
        raise RefusedError(
            f"{type(model).__name__} has no plain self-attention with a replaceable core",
            fix="use a preset such as gpt, llama, bert or vit; or a model of transformers with an attention "
            "interface; or store causal_attention_reference or full_attention in the attribute `core` of a module "
            "with `qkv`",
        )
    return sites


def _torch_attention(causal: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=shared)


def _none() -> None:
    """Do nothing; used in place of a missing core."""


def _is_of_transformers(name: str, module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    named = any(word in name or word in type(module).__name__ for word in CROSS)
    return (
        hasattr(config, "_attn_implementation")
        and isinstance(getattr(module, "is_causal", None), bool)
        and not named
        and not getattr(module, "is_cross_attention", False)
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
    more = [name for name in FURTHER if options.get(name) is not None]
    if dropout or more:
        raise RefusedError(
            f"{type(module).__name__} requires an attention with {', '.join(['dropout'] * bool(dropout) + more)}",
            fix=f"choose a model without {' and '.join(more)}" if more else "set the config's attention dropout to 0",
        )
    if attention_mask is None:
        attention_mask = _causality(module, query, key, options.get("is_causal"))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    out = core(query, key, value) if attention_mask is None else core(query, key, value, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _causality(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None) -> Tensor | None:
    """Return the causal mask (1, 1, t, s) for a causal call of a non-causal module; None if no mask is required."""
    if is_causal is None or bool(is_causal) == bool(getattr(module, "is_causal", False)):
        return None
    if not is_causal:
        raise RefusedError(
            f"{type(module).__name__} is causal, but is called with is_causal=False", fix="choose another model"
        )
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
