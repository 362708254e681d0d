"""What attention over fewer pairs costs in accuracy, beside the cycles that it saves.

Of exact softmax over all visible pairs, the share that the kept ones have; and the outputs, softmax over the kept pairs
alone, against the exact ones. What a model makes of that is another matter: `masked_replay.py` computes its loss.
"""

from dataclasses import dataclass

import numpy as np
import torch

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_filters.keep_masks import exact_scores, seen_softmax
from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace


@dataclass(frozen=True)
class AttentionError:
    """Over all queries of a trace."""

    softmax_kept: float
    """The mean share of a query's softmax."""
    output_error: float | None
    """‖kept - exact‖ / ‖exact‖ of all outputs together; None where no values were recorded."""


def computed_pairs(layer: AttentionLayer) -> np.ndarray:
    """(e, h, t, s) pairs of which outputs are made: those that are kept, of queries that a filter left "alive"."""
    kept, alive = layer.kept(), layer.count("alive")
    if alive is not None:
        kept = kept & (alive > 0)[..., None]
    return kept.reshape(layer.examples, layer.heads, layer.queries, layer.keys)


def attention_cost(before: AttentionTrace, after: AttentionTrace) -> AttentionError:
    """Of the masks in `after`, where `before` tells what is visible, and has queries and keys. A query that computes
    nothing gives zeros. Raises UsageError for traces without queries and keys."""
    share, queries, wrong, whole = 0.0, 0, 0.0, 0.0
    for old, new in zip(before.layers, after.layers, strict=True):
        if old.q is None or old.k is None:
            raise UsageError(f"layer {old.name} has no queries and keys", fix="record a run or a preset")
        visible, kept = (torch.from_numpy(computed_pairs(layer)) for layer in (old, new))
        q, k = (torch.from_numpy(x.astype(np.float32)) for x in (old.q, old.k))
        exact = seen_softmax(scores := exact_scores(q, k), visible)
        share += float((exact * kept).sum())
        queries += int(visible.any(-1).sum())
        if old.v is not None:
            v = torch.from_numpy(old.v.astype(np.float32))
            outputs = exact @ v
            wrong += float((seen_softmax(scores, kept) @ v - outputs).square().sum())
            whole += float(outputs.square().sum())
    return AttentionError(share / queries, (wrong / whole) ** 0.5 if whole else None)
