"""Where a model computes attention of tokens over themselves, and how another core takes the plain one's place.

In our models the core is an attribute of the attention: q (b, h, t, k), k and v (b, g, s, k) and, where there is one, a
mask, to (b, h, t, k). Models of transformers look theirs up by a name in their config; one under our own name
is registered there, which asks the module for its core.
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
"""The name of ours among the attention functions of transformers."""
HEADS = ("heads", "num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")
"""By what attributes attention modules, or their configs, may know how many heads they have."""
CROSS = ("cross", "encoder_attn", "EncDec")
"""By what in their names attentions over another sequence are known there."""
FURTHER = ("softcap", "s_aux", "position_bias")
"""What some models of transformers ask of attention beyond a scale and a mask."""


class SwappableCore:
    """What computes a module's attention: `way`, which can be changed without anybody around noticing. While something
    watches, it is given the queries, the keys and the mask of each call."""

    def __init__(self, way: AttentionCore):
        self.way = way
        self.watch: Callable[[Tensor, Tensor, Tensor | None], None] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.watch is not None:
            self.watch(q, k, mask)
        return self.way(q, k, v) if mask is None else self.way(q, k, v, mask)


@dataclass(frozen=True)
class AttentionSite:
    """One attention of a model."""

    name: str
    module: nn.Module
    causal: bool
    plain: AttentionCore
    """The core that was there, or one that computes the same."""
    whole: nn.Module | None = None
    """The model of transformers that it is in; None for a model of ours."""

    @property
    def head_width(self) -> int:
        """Numbers of a query. Raises RefusedError where the module does not say."""
        return self._number(HEAD_WIDTHS, "how wide its heads are")

    @property
    def heads(self) -> int:
        """Heads of queries. Raises RefusedError where neither the module nor its config says."""
        return self._number(HEADS, "how many heads it has")

    @property
    def key_heads(self) -> int:
        """Heads of keys, as many as of queries where nothing else is said."""
        return self._number((*KEY_HEADS, *HEADS), "how many heads it has")

    def _number(self, names: Sequence[str], what: str) -> int:
        for owner in (self.module, getattr(self.module, "config", None)):
            for name in names:
                if isinstance(number := getattr(owner, name, None), int):
                    return number
        raise RefusedError(f"{self.name} does not say {what}", fix=f"give it an attribute {', '.join(names)}")

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
        """By what name the whole looks up its plain attention, also while ours is in its place."""
        assert self.whole is not None
        name = self.whole.config._attn_implementation  # type: ignore[union-attr]
        return self.whole.plain_attention if name == INTERFACE else name  # type: ignore[return-value]

    def take_away(self) -> None:
        """The plain core again; of a model of transformers the implementation as well, once no core is left."""
        if self.whole is None:
            self.module.core = self.plain
        elif hasattr(self.module, "thrifty_core"):
            del self.module.thrifty_core
            if not any(hasattr(module, "thrifty_core") for module in self.whole.modules()):
                self.whole.set_attn_implementation(self.implementation)  # type: ignore[operator]


ATTENTION_SITES: ModuleNote[list[AttentionSite]] = ModuleNote("attention_sites")
"""On a model: the sites of its replaced cores."""
LOSING_CORES: ModuleNote[list[Any]] = ModuleNote("losing_cores")
"""On a model: cores that leave losses in their attribute `losses`, a list while they are collected."""


def find_attention_sites(model: nn.Module) -> list[AttentionSite]:
    """The attentions of tokens over themselves whose core is plain and can be replaced. Raises RefusedError for a model
    without any."""
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
            f"{type(model).__name__} has no plain attention over its own tokens with a core that can be replaced",
            fix="use a preset such as gpt, llama, bert or vit, a model of transformers that uses its attention "
            "interface, or keep causal_attention_reference or full_attention in an attribute `core` beside `qkv`",
        )
    return sites


def _torch_attention(causal: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=shared)


def _none() -> None:
    """Stands for a core where there is none."""


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
    """Make the name known, with masks as torch's own attention is given them: none where causality says all."""
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
    **given: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: the module's core, or torch's attention where it has none."""
    core = getattr(module, "thrifty_core", None)
    if core is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )  # type: ignore[return-value]
    more = [name for name in FURTHER if given.get(name) is not None]
    if dropout or more:
        raise RefusedError(
            f"{type(module).__name__} asks its attention for {', '.join(['dropout'] * bool(dropout) + more)}",
            fix="set the config's attention dropout to 0" if dropout and not more else "choose another model",
        )
    if attention_mask is None:
        attention_mask = _causality(module, query, key, given.get("is_causal"))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    out = core(query, key, value) if attention_mask is None else core(query, key, value, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _causality(module: nn.Module, query: Tensor, key: Tensor, told: bool | None) -> Tensor | None:
    """The mask (1, 1, t, s) of a call that is causal in a module that does not say so of itself."""
    if told is None or bool(told) == bool(getattr(module, "is_causal", False)):
        return None
    if not told:
        raise RefusedError(f"{type(module).__name__} is told at a call to look ahead", fix="choose another model")
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
