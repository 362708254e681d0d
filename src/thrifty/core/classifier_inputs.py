"""Arguments by which a classifier of `transformers` is called on padded texts."""

import inspect
from typing import Any

from torch import Tensor, nn


def takes_text(model: nn.Module) -> bool:
    """Return True for a model that takes texts by the names of transformers."""
    return "input_ids" in inspect.signature(model.forward).parameters


def classifier_inputs(
    model: nn.Module, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments for tokens (b, t), of which those that `keep` (b, t) marks are no padding. `types` (b, t), 1
    in the second text of a pair, are for models with several types of tokens; no model keeps a cache."""
    takes = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)  # of a model of the user's own, none or another
    has_types = not hasattr(config, "model_type") or (getattr(config, "type_vocab_size", None) or 0) > 1
    inputs: dict[str, Any] = {"input_ids": tokens}
    if keep is not None:
        inputs["attention_mask"] = keep.long()
    if types is not None and has_types and "token_type_ids" in takes:
        inputs["token_type_ids"] = types
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})
