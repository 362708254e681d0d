"""Self-attention modules of a model whose attention can be replaced.

Three kinds of modules are known: modules that call an attribute `core`, as in Thrifty's models; modules of transformers
that look up their attention function; and all others that call torch's attention function, or a softmax of their own.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, class_name
from thrifty.core.run_notes import add_note
from thrifty.kernels.attention_filters.keep_masks import attend_kept, visible_pairs
from thrifty.modeling.attention_calls import attends_to_other, calls_attention, is_causal
from thrifty.modeling.attention_cores import AttentionSite
from thrifty.modeling.caught_attention import CaughtSite
from thrifty.modeling.module_surgery import is_under
from thrifty.modeling.transformers_attention import TransformersSite, looks_up_attention


def find_attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the self-attention modules whose attention can be replaced. Attention between two sequences is left out,
    and so are attention with added or merged keys, and modules with a softmax and matmuls that are no attention; notes
    name them. Raise RefusedError if the model has no self-attention that can be replaced."""
    sites: dict[str, AttentionSite] = {}
    left_out: list[str] = []
    mistaken: list[str] = []
    other_keys: list[str] = []
    wholes: dict[str, nn.Module] = {}  # models of transformers, without those inside them
    for name, module in model.named_modules():
        whole = next((each for path, each in wholes.items() if is_under(name, path)), None)
        if whole is None and hasattr(module, "set_attn_implementation"):
            whole = wholes[name] = module
        if (site := _site(name, module, whole)) is None:
            continue
        if isinstance(site, CaughtSite) and site.is_mistaken:
            mistaken.append(name)
        elif attends_to_other(model, name):
            left_out.append(name)
        elif isinstance(site, CaughtSite) and site.has_other_keys:
            other_keys.append(name)
        else:
            sites[name] = site
    # a block that calls attention in a child has the child's site
    inner = [site for name, site in sites.items() if not any(is_under(other, name) for other in sites if other != name)]
    if not inner:
        raise RefusedError(
            f"no self-attention was found in {class_name(model)}",
            fix="call torch.nn.functional.scaled_dot_product_attention in one module per attention",
        )
    if mistaken:
        add_note(f"left out, because a call showed no attention between all tokens: {', '.join(mistaken)}")
    if left_out:
        add_note(f"left out, because they attend to another sequence: {', '.join(left_out)}")
    if other_keys:
        add_note(f"left out, because their keys are not those of their tokens: {', '.join(other_keys)}")
    return inner


def find_own_sites(model: nn.Module) -> list[AttentionSite]:
    """Return the attention modules that call an attribute `core`, as in Thrifty's models."""
    return [site for name, module in model.named_modules() if (site := _own_site(name, module)) is not None]


def _own_site(name: str, module: nn.Module) -> AttentionSite | None:
    causal = vars(getattr(module, "core", None) or _none).get("is_causal")
    is_own = causal is not None and hasattr(module, "qkv")
    return AttentionSite(name, module, bool(causal), module.core) if is_own else None


def _site(name: str, module: nn.Module, whole: nn.Module | None) -> AttentionSite | None:
    if (own := _own_site(name, module)) is not None:
        return own
    if whole is not None and looks_up_attention(module):
        causal = bool(module.is_causal)
        return TransformersSite(name, module, causal, partial(torch_attention, causal), whole)
    if calls_attention(module):
        causal = is_causal(module)
        return CaughtSite(name, module, causal, partial(torch_attention, causal))
    return None


def torch_attention(
    causal: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention of torch, see `attention_cores`."""
    if bias is not None:
        return attend_kept(q, k, v, visible_pairs(q.shape[2], k.shape[2], causal, mask, q.device), dropout, bias)
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal and mask is None, enable_gqa=shared)


def _none() -> None:
    """Do nothing; used in place of a missing core."""
