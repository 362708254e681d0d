"""Span corruption: replace spans of a text by sentinels, and predict each span after its sentinel.

Paper     Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (T5,
          arXiv 1910.10683), section 3.1.4 and table 6: 15 % of the tokens in spans of 3 on average.

The number of cut tokens and spans depends only on the length of the text. All sources of a batch therefore have one
length, all targets another, and there is no padding. Text and cut-out spans alternate, text first.
"""

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.kernels.example_rng import random_integers, random_subset


def sentinel(number: int) -> str:
    """Return the name of a span's sentinel, by the convention of T5."""
    return f"<extra_id_{number}>"


def span_counts(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the number of cut tokens and the number of spans of a text."""
    cut = min(max(round(length * rate), 1), length - 1)
    return cut, min(max(round(cut / mean_span), 1), cut, length - cut)


def lengths(text: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the number of source and target tokens of a text, with one sentinel per span and one end in each."""
    cut, spans = span_counts(text, rate, mean_span)
    return text - cut + spans + 1, cut + spans + 1


def text_length(length: int, rate: float, mean_span: float) -> int:
    """Return the length of the longest text whose source and target have at most `length` tokens.

    Raises UsageError if there is none.
    """
    text = 2
    if max(lengths(text, rate, mean_span)) > length:
        raise UsageError(f"data.length is {length}, too short to cut spans out", fix="set data.length to 3 or more")
    while max(lengths(text + 1, rate, mean_span)) <= length:
        text += 1
    return text


def corrupt_spans(
    tokens: np.ndarray, keys: np.ndarray, cut: int, spans: int, sentinels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return sources (b, n - cut + spans) and targets (b, cut + spans) of texts (b, n).

    `cut` tokens in `spans` spans are cut out. A sentinel replaces each span in the source and precedes it in the
    target. `keys` (b,) seed the positions: every division of both kinds of token into `spans` parts is equally likely.
    """
    b, n = tokens.shape
    kept_parts = _parts(keys, n - cut, spans, skip=0)
    cut_parts = _parts(keys, cut, spans, skip=n - cut)
    ends = np.stack((kept_parts, cut_parts), axis=2).reshape(b, 2 * spans).cumsum(axis=1)
    begins = np.zeros((b, n + 1), dtype=np.int64)
    np.put_along_axis(begins, ends, 1, axis=1)
    begins[:, 0] = 1
    part = begins[:, :n].cumsum(axis=1) - 1  # 0, 2, … are text, 1, 3, … are spans
    first, is_cut, marks = begins[:, :n] == 1, part % 2 == 1, sentinels[part // 2]
    source = np.where(is_cut, marks, tokens)[~is_cut | first]
    # a target has no text, so the first token of the text before a span becomes the sentinel of that span
    target = np.where(is_cut, tokens, marks)[is_cut | first]
    return source.reshape(b, n - cut + spans), target.reshape(b, cut + spans)


def _parts(keys: np.ndarray, items: int, parts: int, skip: int) -> np.ndarray:
    """Return the sizes of `parts` non-empty parts into which `items` items are divided at random, (b, parts)."""
    if parts == 1:
        return np.full((len(keys), 1), items)
    borders = random_subset(random_integers(keys, items - 1, skip), parts - 1) + 1
    return np.diff(borders, axis=1, prepend=0, append=items)
