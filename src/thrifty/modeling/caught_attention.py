"""Attention modules that call torch's attention function, or a softmax of their own, and the replacement of that call.

Which modules call attention is read from the names in their code (`calls_attention`), before they run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.attention_calls import SDPA, adds_keys, has_own_softmax
from thrifty.modeling.attention_catcher import CatchAttention, CaughtCall
from thrifty.modeling.attention_cores import HEADS, KEY_HEADS, AttentionCore, AttentionSite, hides_later_keys
from thrifty.modeling.attention_trial import (
    ObservedHeads,
    has_other_keys,
    observed_heads,
    observed_mask,
    runs_without_attention,
)
from thrifty.modeling.module_surgery import wrap_forward


@dataclass(frozen=True)
class CaughtSite(AttentionSite):
    """An attention module whose call of an attention function is replaced."""

    @property
    def heads(self) -> int:
        return self._number(HEADS) or (self._observed.heads if self._observed else super().heads)

    @property
    def key_heads(self) -> int:
        stated = self._number((*KEY_HEADS, *HEADS))
        return stated or (self._observed.key_heads if self._observed else super().key_heads)

    @cached_property
    def _observed(self) -> ObservedHeads | None:
        return observed_heads(self.module, self.width)

    @property
    def hides_later_keys(self) -> bool:
        try:
            mask = observed_mask(self.module, self.width)
        except RefusedError:  # the width of its inputs is unknown
            return False
        return mask is not None and hides_later_keys(mask)

    @property
    def has_other_keys(self) -> bool:
        """True if the attention has other keys than its tokens, as its settings or a call of the module show."""
        if hasattr(self.module, "thrifty_core") or has_own_softmax(self.module):
            return False  # a core answers the call
        try:
            return adds_keys(self.module) or has_other_keys(self.module, self.width)
        except RefusedError:  # the width of its inputs is unknown
            return False

    @property
    def is_mistaken(self) -> bool:
        """True if a call of the module shows that its softmax is no attention."""
        # a core that was put into the module answers its call
        if hasattr(self.module, "thrifty_core") or not has_own_softmax(self.module):
            return False
        try:
            return runs_without_attention(self.module, self.width)
        except RefusedError:  # the width of its inputs is unknown
            return False

    def put(self, core: AttentionCore) -> None:
        if not hasattr(self.module, "thrifty_core"):
            wrap_forward(self.module, partial(_catching, self.name, self.causal, self._number(HEADS)))
        self.module.thrifty_core = core

    @property
    def current(self) -> AttentionCore:
        return getattr(self.module, "thrifty_core", None) or self.plain

    def take_away(self) -> None:
        if hasattr(self.module, "thrifty_core"):
            self.module.thrifty_core = None


def _catching(
    name: str, causal: bool, heads: int | None, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if module.thrifty_core is None:
        return inner(*args, **kwargs)
    call = CaughtCall(module.thrifty_core, causal, heads)
    with CatchAttention(call):
        result = inner(*args, **kwargs)
    if call.reason and not call.is_done:
        raise RefusedError(
            f"the attention of {name} was not recognized: {call.reason}",
            fix=f"call torch.nn.functional.{SDPA} there",
        )
    return result
