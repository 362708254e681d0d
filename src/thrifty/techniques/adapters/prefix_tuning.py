"""Prefix tuning (Li and Liang 2021): prepend trained keys and values to every attention.

Paper       Li and Liang 2021, Prefix-Tuning (arXiv 2101.00190), sections 4.2 and 4.3.
Promise     A frozen model learns 2 · p · d values per block, for p virtual tokens and width d.
Use         model = thrifty.apply(model, "prefix_tuning", tokens=5)
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `prefix_tuning:tokens=5` and a learning rate of 1e-3. With `hidden=0`, use a learning rate a hundred times
            larger.
Cost        Every attention has p more keys. Unless `hidden=0`, training also runs the paper's network for prefixes
            (section 4.3), which is dropped after training.
Avoid       Deployments that require the plain architecture, because a prefix cannot be merged into the weights. LoRA
            adapters can be merged.
Does not    Change the frozen weights or the length of the output.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError, class_name
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural, Positive
from thrifty.modeling.adapter_base import AdapterTechnique, names_ending, train_only
from thrifty.modeling.attention_cores import AttentionCore, AttentionSite, call_core
from thrifty.modeling.attention_sites import find_attention_sites
from thrifty.modeling.caught_attention import CaughtSite
from thrifty.modeling.module_surgery import find_stacks, wrap_forward
from thrifty.techniques.adapters._kv_cache import (
    cache_shapes,
    is_reader,
    is_two_sided,
    refuse_own_recomputation,
    unwritten_cache,
)
from thrifty.techniques.adapters._virtual_tokens import (
    extend_masks,
    named_inputs,
    position_limit,
    refuse_beyond,
    refuse_shared_rows,
)

NETWORK_PARAMETERS = ("prefix_table", "prefix_in", "prefix_in_bias")
SITE_PARAMETERS = ("prefix_out", "prefix_out_bias")


class PrefixSite(NamedTuple):
    """A module with a prefix: an attention, or a block of transformers that caches keys and values."""

    module: nn.Module
    heads: int
    """Number of key-value heads, g."""
    head_width: int
    attention: AttentionSite | None = None
    """The attention whose core gets the prefix; None if a cache passes the prefix."""


PrefixSites = Mapping[str, PrefixSite]


def make_prefix(table: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    """Return the prefix of a block: tanh(E W_inᵀ + b_in) W_outᵀ + b_out for the table E.

    E is (p, e), the prefix is (p, 2 · g · k). p is the number of virtual tokens, e the width of the table, g the number
    of key-value heads and k the head width.
    """
    return F.linear(torch.tanh(F.linear(table, w_in, b_in)), w_out, b_out)


def keys_and_values(prefix: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Split a prefix into keys and values. The prefix (p, 2 · g · k) stores keys first; the results are (g, p, k).

    p is the number of virtual tokens, g = `heads` the number of key-value heads and k the head width.
    """
    keys, values = prefix.unflatten(-1, (2, heads, -1)).permute(1, 2, 0, 3)
    return keys, values


def attend_with_prefix(
    core: AttentionCore,
    prefix: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries over a prefix and the keys and values after the prefix.

    q and the result are (b, h, t, k), the prefix is (p, 2 · g · k), k and v are (b, g, s, k). The core may be causal,
    align the last query with the last key, or require as many queries as keys. So p = `len(prefix)` queries are
    prepended, and their outputs are dropped. Scores of prefixes have no bias.
    """
    count = len(prefix)
    prefixes = [x.to(k.dtype).expand(len(k), -1, -1, -1) for x in keys_and_values(prefix, k.shape[1])]
    k, v = (torch.cat(pair, 2) for pair in zip(prefixes, (k, v), strict=True))
    if mask is not None:
        mask = _before(mask, count, True if mask.dtype == torch.bool else 0.0)
        if mask.dtype == torch.bool and mask.shape[-2] > 1:  # otherwise dropped queries show later keys to the core
            mask[..., :count, :] = torch.ones(count, mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
    if bias is not None:
        bias = _before(bias.expand(*bias.shape[:-1], k.shape[2] - count), count, 0.0)
    return call_core(core, F.pad(q, (0, 0, count, 0)), k, v, mask, dropout, bias)[:, :, count:]


def _before(x: Tensor, count: int, value: float) -> Tensor:
    """Add `count` rows and columns of a value before a mask or a bias (…, t, s); no rows if t is 1 for all queries."""
    return F.pad(x, (count, 0, count if x.shape[-2] > 1 else 0, 0), value=value)


def body_of(model: nn.Module) -> nn.Module:
    """Return the module that owns the table of the prefix network.

    In a model of transformers with a cache, the owner is the module that contains the (last) stack of blocks and takes
    tokens and the cache. In other models the owner is the parent of the (first) stack.
    """
    return model.get_submodule(_body_path(model))


def _body_path(model: nn.Module) -> str:
    stacks = [*find_stacks(model)]
    words = stacks[-1].split(".")
    ancestors = (".".join(words[:count]) for count in reversed(range(len(words))))
    return next((path for path in ancestors if is_reader(model.get_submodule(path))), stacks[0].rpartition(".")[0])


def prefix_of(module: nn.Module, body: nn.Module) -> Tensor:
    """Return the prefix of a module: its own parameter, or an output of the prefix network in `body`.

    The prefix is (p, 2 · g · k). p is the number of virtual tokens, g the number of key-value heads and k the head
    width.
    """
    if hasattr(module, "prefix"):
        return module.prefix
    network = (getattr(body, name) for name in NETWORK_PARAMETERS)
    return make_prefix(*network, module.prefix_out, module.prefix_out_bias)


@torch.no_grad()
def set_prefixes(model: nn.Module, sites: PrefixSites, tokens: int, hidden: int, seed: int) -> None:
    """Add the prefix parameters of each module in `sites`, initialized as in `nn.Embedding` and `nn.Linear`."""
    shapes: dict[str, tuple[int, ...]] = {}
    path = _body_path(model)
    body_prefix = f"{path}." if path else ""
    for name, site in sites.items():
        width = site.heads * site.head_width
        if hidden:
            shapes |= {f"{name}.prefix_out": (2 * width, hidden), f"{name}.prefix_out_bias": (2 * width,)}
            network_shapes = ((tokens, width), (hidden, width), (hidden,))
            shapes |= {
                f"{body_prefix}{last}": shape for last, shape in zip(NETWORK_PARAMETERS, network_shapes, strict=True)
            }
        else:
            shapes[f"{name}.prefix"] = (tokens, 2 * width)
    like = next(model.parameters())
    for path, shape in shapes.items():
        values, generator = torch.empty(shape, device=like.device), keyed_generator(f"{seed}/{path}", like)
        owner, _, last = path.rpartition(".")
        if last in ("prefix", "prefix_table"):
            values.normal_(generator=generator)
        else:
            bound = shapes[path.removesuffix("_bias")][1] ** -0.5
            values.uniform_(-bound, bound, generator=generator)
        setattr(model.get_submodule(owner), last, nn.Parameter(values))


@torch.no_grad()
def collapse(model: nn.Module) -> None:
    """Replace the prefix network by the prefixes that the network computes."""
    body = body_of(model)
    for module in model.modules():
        if hasattr(module, "prefix_out"):
            module.prefix = nn.Parameter(prefix_of(module, body))
            del module.prefix_out, module.prefix_out_bias
    if hasattr(body, "prefix_table"):
        del body.prefix_table, body.prefix_in, body.prefix_in_bias
    train_only(model, names_ending(model, "prefix"))


def find_prefix_sites(model: nn.Module) -> PrefixSites:
    """Return the modules that get a prefix, by name. These are all attentions with an attribute `core`; or, in a model
    of transformers, the blocks that cache keys and values; or all self-attentions that can be replaced."""
    cores = {name: _own_site(name, module) for name, module in model.named_modules() if hasattr(module, "core")}
    return cores or _cached_blocks(model) or _attentions(model)


def _own_site(name: str, module: nn.Module) -> PrefixSite:
    attention = AttentionSite(name, module, causal=False, plain=module.core)
    return PrefixSite(module, getattr(module, "kv_heads", module.heads), module.head_width, attention)


def _attentions(model: nn.Module) -> PrefixSites:
    sites = find_attention_sites(model)
    return {site.name: PrefixSite(site.module, site.key_heads, site.head_width, site) for site in sites}


def _cached_blocks(model: nn.Module) -> PrefixSites:
    """Return the blocks of a model of transformers that cache keys and values; none for a model without a cache."""
    stacks = find_stacks(model)
    name, blocks = [*stacks.items()][-1]
    body = body_of(model)
    if len(stacks) > 2 or not hasattr(body, "config") or not is_reader(body):
        return {}
    shapes = cache_shapes(body)
    if len(shapes) != len(blocks):
        raise RefusedError(
            f"{class_name(model)} has {len(blocks)} blocks, but caches keys and values of {len(shapes)} blocks",
            fix="--with adapters.lora",
        )
    pairs = enumerate(zip(blocks, shapes, strict=True))
    return {f"{name}.{index}": PrefixSite(block, shape[1], shape[3]) for index, (block, shape) in pairs}


def prepend_prefix(model: nn.Module, sites: PrefixSites, tokens: int) -> None:
    """Prepend the prefix in every attention. In Thrifty's models, positions start after the prefix."""
    body = body_of(model)
    attentions = [site.attention for site in sites.values() if site.attention is not None]
    if not attentions:
        wrap_forward(
            body, partial(_with_prefix_cache, [*sites.values()], tokens, position_limit(body), is_two_sided(model))
        )
        return
    wrap_forward(body, _refuse_packed_rows)
    for attention in attentions:
        attention.put(partial(_core_with_prefix, attention.module, body, attention.current))
        if isinstance(attention, CaughtSite):
            attention.module.has_attended = True
            wrap_forward(attention.module, partial(_require_prefix, attention.name))
    if len(find_stacks(model)) == 1:
        for module in model.modules():
            if isinstance(getattr(module, "start", None), int):
                module.start = tokens


def _refuse_packed_rows(body: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_shared_rows(named_inputs(body, args, kwargs))
    return inner(*args, **kwargs)


def _core_with_prefix(
    attention: nn.Module, body: nn.Module, core: AttentionCore, *inputs: Tensor, **options: Any
) -> Tensor:
    attention.has_attended = True
    return attend_with_prefix(core, prefix_of(attention, body), *inputs, **options)


def _require_prefix(name: str, attention: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    attention.has_attended = False
    output = inner(*args, **kwargs)
    if not attention.has_attended:
        raise UsageError(
            f"a call of {name} left out its prefix, because it has more keys than queries",
            fix="pass whole texts, without a cache of keys and values",
        )
    return output


def _with_prefix_cache(
    sites: list[PrefixSite],
    tokens: int,
    limit: int | None,
    two_sided: bool,
    body: nn.Module,
    inner: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a model of transformers and pass the prefixes as its cache of keys and values."""
    refuse_own_recomputation(body)
    inputs = named_inputs(body, args, kwargs)
    inputs |= extend_masks(inputs, tokens) | {"use_cache": False}
    if inputs.get("position_ids") is not None:
        inputs["position_ids"] = inputs["position_ids"] + tokens
    tokens_or_states = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
    refuse_beyond(limit, tokens, tokens_or_states.shape[1])
    pairs = [keys_and_values(prefix_of(site.module, body), site.heads) for site in sites]
    inputs["past_key_values"] = unwritten_cache(pairs, len(tokens_or_states), two_sided)
    output = inner(**inputs)
    if "past_key_values" in output:
        output.past_key_values = None
    return output


class PrefixTuning(AdapterTechnique):
    """A network maps one table E (p, d) to the keys and values of every block: Linear(hidden), tanh, Linear(2 d). For
    12 blocks of width 768 the network has 9.9M parameters, which compute 0.1M prefix values. `collapse` drops the
    network after training. The paper trains the network with learning rate 5e-5. The published code uses 5 tokens. For
    summaries the code uses 200 tokens and a network width of 800. Real tokens take the positions after the prefix, as
    in the published code.

    Models of transformers with a cache receive the prefix through a read-only cache of keys and values, as in peft, so
    recomputation works. Their encoder-decoders receive prefixes in decoder self-attention only. Models without a cache,
    such as ViT, DistilBERT and hand-written modules, receive prefixes in every self-attention, before unchanged
    positions; peft fails on ViT and DistilBERT. Models of this package receive prefixes in every attention.

    Differs from peft 0.21 for encoder-decoders: here every block has its own prefix. In peft, block i of L uses prefix
    2 i mod L. For even L, half of the prefixes are used twice and the other half never.
    """

    tokens: Positive = 5
    """Number of virtual tokens, p."""
    hidden: Natural = 512
    """Width of the network that computes the prefixes; 0 trains the prefixes directly."""
    seed: int = 0
    """Seed of the initial values, combined with each parameter's name."""

    def model(self, model: nn.Module) -> nn.Module:
        sites = find_prefix_sites(model)
        set_prefixes(model, sites, self.tokens, self.hidden, self.seed)
        prepend_prefix(model, sites, self.tokens)
        add_note(f"{self.tokens} keys and values prepended in {len(sites)} attentions")
        train_only(model, names_ending(model, "prefix", *NETWORK_PARAMETERS, *SITE_PARAMETERS))
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        raise self.refuse_plain("keys and values before the text")
