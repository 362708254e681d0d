"""Where models of transformers look for the keys and values of what they have read before, and something put there for
them to find: prefixes of adapters."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.randomness import preserved_draws

_READER = {"input_ids", "past_key_values"}


def is_reader(module: nn.Module) -> bool:
    """Whether a module takes tokens together with keys and values of earlier ones."""
    return inspect.signature(type(module).forward).parameters.keys() >= _READER


def is_two_sided(model: nn.Module) -> bool:
    """Whether a model, or one inside it, has an encoder that its reader attends to."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "is_encoder_decoder", False) for config in configs)


def cache_shapes(body: nn.Module) -> list[torch.Size]:
    """Of the keys of self-attention that each block of a reader would keep, (b, g, t, k), as it says itself: configs
    name heads in many ways, and some share one among all queries. An encoder says so only of a cache that it is given.
    Raises RefusedError where values are not of the same shape."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(body.parameters()).device)
    in_training = [module for module in body.modules() if module.training]
    body.eval()  # in training a model may leave blocks out, or keep nothing because it makes its blocks again
    with torch.no_grad(), preserved_draws([tokens]):
        filled = _fill(body, tokens)
    for module in in_training:
        module.training = True
    layers = getattr(getattr(filled, "self_attention_cache", filled), "layers", [])
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    if any(keys is None or values is None or keys.ndim != 4 or keys.shape != values.shape for keys, values in pairs):
        raise RefusedError(
            f"{type(body).__name__} keeps something else than keys and values of equal shape", fix="use adapters.lora"
        )
    return [keys.shape for keys, _ in pairs]


def _fill(body: nn.Module, tokens: Tensor) -> Any:
    from transformers import DynamicCache

    # by its class, since a prefix that is there already would not let the cache out
    forward, more = type(body).forward, {"input_ids": tokens, "return_dict": True}
    kept = forward(body, **more, use_cache=True).past_key_values
    if kept is None:
        forward(body, **more, past_key_values=(kept := DynamicCache()))
    return kept


def refuse_own_recomputation(body: nn.Module) -> None:
    """Raises UsageError for a reader that will leave out its cache because it computes its blocks again itself."""
    if any(module.training and getattr(module, "gradient_checkpointing", False) for module in body.modules()):
        raise UsageError(
            f"{type(body).__name__} computes its blocks again itself, and leaves out its cache with the prefix in it",
            fix="call its gradient_checkpointing_disable, and take --with memory.recompute",
        )


def unwritten_cache(pairs: list[tuple[Tensor, Tensor]], batch: int, two_sided: bool) -> Any:
    """A cache in which each block finds keys and values (g, p, k), and in which nothing is kept: what is computed again
    finds it unchanged. For the decoder of a two-sided model they are those of its self-attention, and what it attends
    to of the encoder is left as it is."""
    filled = _layers_of([tuple(x.expand(batch, -1, -1, -1) for x in pair) for pair in pairs])
    if not two_sided:
        return filled
    from transformers import EncoderDecoderCache

    both = EncoderDecoderCache(filled, _layers_of([(None, None)] * len(pairs)))
    both.is_updated = _NeverWritten()
    return both


class _NeverWritten(dict[int, bool]):
    """By block, whether the keys of the encoder's tokens are in the cache already: never."""

    def __setitem__(self, block: int, written: bool) -> None:
        """Forgotten, as the keys are."""


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
        """Gives what it holds, in front of what it is given, and keeps nothing."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                return key_states, value_states
            pairs = ((self.keys, key_states), (self.values, value_states))
            keys, values = (torch.cat((before.to(new.dtype), new), 2) for before, new in pairs)
            return keys, values

    return UnwrittenLayer
