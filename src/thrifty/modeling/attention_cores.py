"""Attention cores, and places in models where cores can be replaced.

A core maps q (b, h, t, k), k and v (b, g, s, k) and an optional boolean mask to (b, h, t, k). Further optional
arguments are a dropout rate of the weights, and a bias (b or 1, h or 1, t, s) that is added to the scores.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.kernels.autocast_inputs import cast_for_autocast

AttentionCore = Callable[..., Tensor]
HEAD_WIDTHS = (
    "qk_head_dim",
    "head_width",
    "head_dim",
    "head_size",
    "attention_head_size",
    "key_value_proj_dim",
    "d_head",
    "d_k",
)
HEADS = ("heads", "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "nheads", "h")
KEY_HEADS = ("kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
"""Attributes of attention modules or configs that store the number of key heads."""
INPUT_WIDTHS = ("in_features", "embed_dim", "nx")
"""Attributes of linear layers, of nn.MultiheadAttention and of Conv1D of transformers."""
CONFIGS = ("config", "cfg", "args")


def call_core(
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Call a core without the arguments that have no effect, so that a core may lack them. Under autocast, queries,
    keys and values have its dtype, as in torch's attention."""
    q, k, v = cast_for_autocast(q, k, v)
    options: dict[str, Any] = {"dropout": dropout} if dropout else {}
    options |= {"bias": bias} if bias is not None else {}
    return core(q, k, v, **options) if mask is None else core(q, k, v, mask, **options)


class SwappableCore:
    """An attention core that calls another core, its attribute `core`, which can be replaced at any time. `watch`
    receives the queries, keys, mask and bias of each call."""

    def __init__(self, core: AttentionCore):
        self.core = core
        self.watch: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        if self.watch is not None:
            self.watch(q, k, mask, options.get("bias"))
        return call_core(self.core, q, k, v, mask, **options)


HIDDEN = -9e3
"""Numbers below this number hide pairs when they are added to scores."""


def has_values(x: Tensor) -> bool:
    """Return False while code is compiled, and for tensors without values."""
    return not (torch.compiler.is_compiling() or x.is_meta or is_fake(x))


_HIDING: MutableMapping[Tensor, tuple[int, bool]] = WeakTensorKeyDictionary()
"""Masks that are in use, each with the number of writes to it and whether it hides later keys."""


@torch.compiler.disable  # compiled models decide as others do
def hides_later_keys(visible: Tensor) -> bool:
    """Return True if no pair (…, t or 1, s) has a later key, as in a decoder. Return False without values. Layers may
    share a mask, so its result is remembered until a write to it. Writes to its `data`, or to a NumPy array that shares
    its memory, are not noticed."""
    if not has_values(visible):
        return False
    if visible.is_inference():  # its writes are not counted
        return _hides_later_keys(visible)
    if _HIDING.get(visible, (-1,))[0] != visible._version:
        _HIDING[visible] = visible._version, _hides_later_keys(visible)
    return _HIDING[visible][1]


def _hides_later_keys(visible: Tensor) -> bool:
    with _disable_current_modes():  # each trace of a block must contain the same operations
        return not bool(visible.triu(1).any())


def visible_and_bias(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return an additive mask as a boolean mask and a bias. Without values, as while code is compiled, the mask may be
    a bias."""
    if mask.dtype == torch.bool:
        return mask, None
    seen = mask > HIDDEN
    if has_values(mask) and not mask.requires_grad and bool(((mask == 0) | ~seen).all()):
        return seen, None
    return seen, mask


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model. The module calls its attribute `core`, as modules of Thrifty's models do."""

    name: str
    module: nn.Module
    causal: bool
    """True if every call is causal without a mask. Other causal calls have a mask."""
    plain: AttentionCore
    """The module's own attention, or an equivalent core."""

    @property
    def has_causal_masks(self) -> bool:
        """True if each mask of a causal module hides all later keys. Other masks may show later keys, such as other
        patches of an image."""
        return True

    @property
    def hides_later_keys(self) -> bool:
        """True if a trial call of the module has a mask that hides all later keys."""
        return False

    @property
    def head_width(self) -> int:
        """Width of a head. Raise RefusedError if it is unknown."""
        return self._number(HEAD_WIDTHS) or self.width // self.heads

    @property
    def heads(self) -> int:
        """Number of query heads. Raise RefusedError if neither the module nor its config has an attribute for this
        number."""
        return self._required(HEADS, "its number of heads")

    @property
    def key_heads(self) -> int:
        """Number of key heads; by default the number of query heads."""
        return self._required((*KEY_HEADS, *HEADS), "its number of heads")

    def put(self, core: AttentionCore) -> None:
        self.module.core = core

    @property
    def current(self) -> AttentionCore:
        """The module's core now."""
        return self.module.core  # type: ignore[return-value]

    def take_away(self) -> None:
        """Restore the original core."""
        self.module.core = self.plain

    @property
    def width(self) -> int:
        """Width of the module's input, read from its first layer. Raise RefusedError if it has no layer."""
        for layer in self.module.modules():
            for name in INPUT_WIDTHS:
                if isinstance(number := getattr(layer, name, None), int):
                    return number
        raise RefusedError(f"{self.name} has no linear layer", fix=f"set one of: {', '.join(HEAD_WIDTHS)}")

    def _number(self, names: Sequence[str]) -> int | None:
        for owner in (self.module, *(getattr(self.module, name, None) for name in CONFIGS)):
            for name in names:
                if isinstance(number := getattr(owner, name, None), int):
                    return number
        return None

    def _required(self, names: Sequence[str], what: str) -> int:
        if (number := self._number(names)) is None:
            raise RefusedError(f"{self.name} has no attribute for {what}", fix=f"set one of: {', '.join(names)}")
        return number


ATTENTION_SITES: ModuleNote[list[AttentionSite]] = ModuleNote("attention_sites")
"""Note on a model: the sites of its replaced cores."""
LATER_HIDDEN: ModuleNote[str] = ModuleNote("later_hidden")
"""Note on a causal module: technique whose core hides all later keys, also if a mask shows some of them."""
LOSING_CORES: ModuleNote[list[Any]] = ModuleNote("losing_cores")
"""Note on a model: cores with an attribute `losses`, which is a list while losses are collected."""


def refuse_changed_cores(
    technique: str, sites: Sequence[AttentionSite], own: Mapping[str, AttentionCore] | None = None
) -> None:
    """Raise RefusedError if another technique has changed a core, which a new core of `technique` would drop. `own` are
    the cores of this technique by name."""
    for site in sites:
        if site.current is not (own or {}).get(site.name, site.plain):
            raise RefusedError(
                f"{technique} would replace the attention of {site.name}, which another technique, such as a prefix, "
                "has changed",
                fix="apply it before the other, from step 0; or use thrifty.train, which orders them",
            )
