"""Read-only caches of keys and values that pass the prefixes of adapters to models of transformers."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.randomness import preserved_draws

_READER = {"input_ids", "past_key_values"}


def is_reader(module: nn.Module) -> bool:
    """Return True if the module's forward pass takes tokens and a cache of keys and values."""
    return inspect.signature(type(module).forward).parameters.keys() >= _READER


def is_two_sided(model: nn.Module) -> bool:
    """Return True if the model contains an encoder-decoder."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "is_encoder_decoder", False) for config in configs)


def cache_shapes(body: nn.Module) -> list[torch.Size]:
    """Return the shape of the keys that the self-attention of each block caches.

    Shapes are (b, g, t, k): b is the batch size, g the number of key-value heads, t the tokens, k the head width. The
    shapes come from a forward pass, because configs have different names for the number of heads. Raises RefusedError
    if a block does not cache keys and values of equal shape.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(body.parameters()).device)
    training_modules = [module for module in body.modules() if module.training]
    body.eval()  # in training mode a model may skip blocks, or recompute its blocks and therefore cache nothing
    with torch.no_grad(), preserved_draws([tokens]):
        filled = _fill(body, tokens)
    for module in training_modules:
        module.training = True
    layers = getattr(getattr(filled, "self_attention_cache", filled), "layers", [])
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    if any(keys is None or values is None or keys.ndim != 4 or keys.shape != values.shape for keys, values in pairs):
        raise RefusedError(
            f"{type(body).__name__} does not cache keys and values of equal shape", fix="--with adapters.lora"
        )
    return [keys.shape for keys, _ in pairs]


def _fill(body: nn.Module, tokens: Tensor) -> Any:
    from transformers import DynamicCache

    # the method of the class: an existing prefix would remove the cache from the output
    forward, inputs = type(body).forward, {"input_ids": tokens, "return_dict": True}
    cache = forward(body, **inputs, use_cache=True).past_key_values
    if cache is None:  # an encoder fills only a cache that it receives
        forward(body, **inputs, past_key_values=(cache := DynamicCache()))
    return cache


def refuse_own_recomputation(body: nn.Module) -> None:
    """Raise UsageError if the model's own gradient checkpointing is on, because the model then ignores the cache."""
    if any(module.training and getattr(module, "gradient_checkpointing", False) for module in body.modules()):
        raise UsageError(
            f"{type(body).__name__} uses its own gradient checkpointing, so it ignores the cache that holds the prefix",
            fix="model.gradient_checkpointing_disable(), then --with memory.recompute",
        )


def unwritten_cache(pairs: list[tuple[Tensor, Tensor]], batch: int, two_sided: bool) -> Any:
    """Return a read-only cache of the keys and values of each block, repeated for `batch` examples.

    `pairs` has the keys and values of each block, (g, p, k). g is the number of key-value heads, p the number of
    virtual tokens, k the head width. The cache is read-only, because recomputation must read the same values. In an
    encoder-decoder (`two_sided`), only the self-attention of the decoder reads the cache.
    """
    filled = _layers_of([tuple(x.expand(batch, -1, -1, -1) for x in pair) for pair in pairs])
    if not two_sided:
        return filled
    from transformers import EncoderDecoderCache

    both = EncoderDecoderCache(filled, _layers_of([(None, None)] * len(pairs)))
    both.is_updated = _NeverWritten()
    return both


class _NeverWritten(dict[int, bool]):
    """A mapping that ignores assignments and stays empty. transformers assigns True to a block once the cache holds the
    encoder's keys.
    """

    def __setitem__(self, block: int, written: bool) -> None:
        """Ignore the assignment."""


def _layers_of(pairs: list[Any]) -> Any:
    from transformers import DynamicCache

    filled = DynamicCache()
    for keys, values in pairs:
        layer = _unwritten_layer()()
        if keys is not None:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        filled.layers.append(layer)
    return filled


@cache
def _unwritten_layer() -> type:
    from transformers.cache_utils import DynamicLayer

    class UnwrittenLayer(DynamicLayer):
        """A cache layer that prepends its keys and values to new keys and values, and stores nothing."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                return key_states, value_states
            pairs = ((self.keys, key_states), (self.values, value_states))
            keys, values = (torch.cat((prefix.to(new.dtype), new), 2) for prefix, new in pairs)
            return keys, values

    return UnwrittenLayer
