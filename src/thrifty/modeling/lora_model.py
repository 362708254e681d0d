"""LoRA adapters of a whole model: attach, switch, merge and remove several named adapters on one base.

Base weights are never copied or renamed, for any number of adapters.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from thrifty.core.errors import RefusedError, UsageError, refuse_unknown
from thrifty.core.randomness import keyed_generator
from thrifty.modeling.lora_layers import (
    DEFAULT,
    LORA,
    LoraFactors,
    add_factors,
    attach_adapters,
    detach_adapters,
    parameter_names,
    weight_name,
    with_products,
)
from thrifty.modeling.module_surgery import tied_names


def attach(model: nn.Module, layers: Mapping[str, LoraFactors], name: str = DEFAULT, seed: int = 0) -> None:
    """Add the factors of an adapter to `layers` (by layer name) and activate the adapter. The first adapter freezes the
    base. Initial values depend only on the seed and on the names of layer and adapter. Raise UsageError for an invalid
    or existing name, or while adapters are merged."""
    if not re.fullmatch(r"\w+", name):
        raise UsageError(f"{name!r} is not an adapter name", fix="use letters, digits and underscores")
    if name in adapters(model):
        raise UsageError(f"the model has an adapter {name!r} already", fix="remove it first; or choose another name")
    _refuse_merged(model)
    if not adapters(model):
        model.requires_grad_(False)
    for path, factors in layers.items():
        layer = model.get_submodule(path)
        key = f"{seed}/{path}" if name == DEFAULT else f"{seed}/{path}/{name}"
        add_factors(layer, factors, name, keyed_generator(key, getattr(layer, weight_name(layer))))
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and LORA.get(module.out_proj):
            attach_adapters(module)
    activate(model, name)


def adapted_layers(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the layers with factors of the adapter `name`, by layer name; by default of any adapter."""
    return {path: layer for path, layer in LORA.noted(model) if not name or name in LORA.of(layer).factors}


def adapters(model: nn.Module) -> list[str]:
    """Return the names of a model's adapters, sorted."""
    return sorted({name for layer in adapted_layers(model).values() for name in LORA.of(layer).factors})


def factor_names(model: nn.Module) -> set[str]:
    """Return the parameter names of all factors of all adapters."""
    return {
        f"{path}.{each}" if path else each
        for path, layer in adapted_layers(model).items()
        for name in LORA.of(layer).factors
        for each in parameter_names(name)
    }


def activate(model: nn.Module, *names: str) -> None:
    """Activate the adapters `names` and sum their outputs. Without names only the base is active."""
    _refuse_merged(model)
    check_names(model, names)
    for layer in adapted_layers(model).values():
        LORA.of(layer).active = tuple(name for name in names if name in LORA.of(layer).factors)


@contextmanager
def active_adapters(model: nn.Module, *names: str) -> Iterator[None]:
    """Activate the adapters `names` inside the context only. A backward pass with recomputation must also be inside the
    context."""
    before = {path: LORA.of(layer).active for path, layer in adapted_layers(model).items()}
    activate(model, *names)
    try:
        yield
    finally:
        for path, layer in adapted_layers(model).items():
            LORA.of(layer).active = before.get(path, ())


def remove(model: nn.Module, name: str = DEFAULT) -> None:
    """Remove an adapter. Removal of the last adapter restores the layers' forward; their weights stay frozen."""
    _refuse_merged(model)
    check_names(model, (name,))
    for layer in adapted_layers(model, name).values():
        layer_adapters = LORA.of(layer)
        del layer_adapters.factors[name]
        layer_adapters.active = tuple(each for each in layer_adapters.active if each != name)
        for each in parameter_names(name):
            delattr(layer, each)
    if not adapters(model):
        for layer in adapted_layers(model).values():
            detach_adapters(layer)


@torch.no_grad()
def merge(model: nn.Module, weights: Mapping[str, float] | None = None) -> None:
    """Add the low-rank products B A to the weights, and keep the original weights for `unmerge`. By default the active
    adapters are merged; `weights` instead maps adapter names to multipliers. Sums are computed in float32 or more.
    Layers that are already merged stay unchanged. Raise RefusedError, before any change, for a weight that is shared
    with another layer."""
    check_names(model, weights or ())
    chosen: dict[nn.Module, dict[str, float]] = {}
    aliases = tied_names(model)
    for path, layer in adapted_layers(model).items():
        layer_adapters = LORA.of(layer)
        wanted = dict.fromkeys(layer_adapters.active, 1.0) if weights is None else weights
        own = {name: factor for name, factor in wanted.items() if name in layer_adapters.factors}
        if layer_adapters.original_weight is not None or not own:
            continue
        if f"{path}.{weight_name(layer)}" in {*aliases, *aliases.values()}:
            raise RefusedError(
                f"{path}.{weight_name(layer)} is shared with another layer, which would change as well",
                fix="keep the adapter unmerged: the model with the attached adapter is the trained one",
            )
        chosen[layer] = own
    for layer, own in chosen.items():
        weight = getattr(layer, weight_name(layer))
        LORA.of(layer).original_weight = weight.detach().clone()
        weight.copy_(with_products(layer, own))


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Restore the weights that `merge` kept, bit for bit in any precision."""
    for layer in adapted_layers(model).values():
        layer_adapters = LORA.of(layer)
        if layer_adapters.original_weight is not None:
            getattr(layer, weight_name(layer)).copy_(layer_adapters.original_weight)
            layer_adapters.original_weight = None


def is_merged(model: nn.Module) -> bool:
    return any(LORA.of(layer).original_weight is not None for layer in adapted_layers(model).values())


def merge_and_remove(model: nn.Module) -> None:
    """Merge the active adapters permanently and remove all adapters."""
    merge(model)
    for layer in adapted_layers(model).values():
        LORA.of(layer).original_weight = None
    for name in adapters(model):
        remove(model, name)


def _refuse_merged(model: nn.Module) -> None:
    if is_merged(model):
        raise UsageError("the adapters of this model are merged into its weights", fix="call unmerge first")


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Raise UsageError for an adapter that the model does not have."""
    for name in names:
        refuse_unknown("the model has no adapter", name, adapters(model))
