"""Error of masked attention: the softmax mass of the kept pairs, and the error of the outputs.

The reference is exact softmax over all visible pairs. `masked_replay.py` measures the effect on a model's loss."""

from dataclasses import dataclass

import numpy as np
import torch

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_filters.keep_masks import exact_scores, seen_softmax
from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace


@dataclass(frozen=True)
class AttentionError:
    """Error of masked attention over all queries of a trace."""

    softmax_kept: float
    """Softmax mass of the kept pairs, averaged over queries."""
    output_error: float | None
    """‖kept - exact‖ / ‖exact‖ over all outputs; None if no values were recorded."""


def computed_pairs(layer: AttentionLayer) -> np.ndarray:
    """Return the mask (examples, heads, queries, keys) of kept pairs, without queries that the filter dropped ("alive"
    is 0).
    """
    kept, alive = layer.kept(), layer.count("alive")
    if alive is not None:
        kept = kept & (alive > 0)[..., None]
    return kept.reshape(layer.examples, layer.heads, layer.queries, layer.keys)


def attention_cost(before: AttentionTrace, after: AttentionTrace) -> AttentionError:
    """Return the error of the masks in `after`, relative to exact attention over the pairs of `before`.

    The output of a query without pairs is zero. Raises UsageError if `before` has no queries or no keys.
    """
    mass, queries, squared_error, squared_norm = 0.0, 0, 0.0, 0.0
    for old, new in zip(before.layers, after.layers, strict=True):
        if old.q is None or old.k is None:
            raise UsageError(
                f"layer {old.name!r} has no queries and keys", fix="thrifty trace RUN --out trace.safetensors"
            )
        visible, kept = (torch.from_numpy(computed_pairs(layer)) for layer in (old, new))
        q, k = (torch.from_numpy(x.astype(np.float32)) for x in (old.q, old.k))
        exact = seen_softmax(scores := exact_scores(q, k), visible)
        mass += float((exact * kept).sum())
        queries += int(visible.any(-1).sum())
        if old.v is not None:
            v = torch.from_numpy(old.v.astype(np.float32))
            outputs = exact @ v
            squared_error += float((seen_softmax(scores, kept) @ v - outputs).square().sum())
            squared_norm += float(outputs.square().sum())
    return AttentionError(mass / queries, (squared_error / squared_norm) ** 0.5 if squared_norm else None)
