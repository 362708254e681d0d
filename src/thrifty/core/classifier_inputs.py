"""Keyword arguments for calling a `transformers` classifier on padded texts."""

import inspect
from typing import Any

from torch import Tensor, nn


def takes_text(model: nn.Module) -> bool:
    """Return True if the model's `forward` takes `input_ids`, the name of token ids in transformers."""
    return "input_ids" in inspect.signature(model.forward).parameters


def classifier_inputs(
    model: nn.Module, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None
) -> dict[str, Any]:
    """Return the keyword arguments for token ids of b texts with t tokens, (b, t). `keep` (b, t) is True for tokens
    that are not padding. `types` (b, t) is 1 in the second text of a pair. Only models with several token types receive
    `types`. The key-value cache is off."""
    takes = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)  # a user's own model may have no config, or another kind of config
    has_types = not hasattr(config, "model_type") or (getattr(config, "type_vocab_size", None) or 0) > 1
    inputs: dict[str, Any] = {"input_ids": tokens}
    if keep is not None:
        inputs["attention_mask"] = keep.long()
    if types is not None and has_types and "token_type_ids" in takes:
        inputs["token_type_ids"] = types
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})
