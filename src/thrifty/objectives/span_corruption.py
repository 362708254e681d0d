"""Span corruption: replace spans of a text by sentinel tokens, and predict the removed spans.

Paper     Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (T5,
          arXiv 1910.10683), section 3.1.4 and table 6: 15 % of the tokens in spans of 3 on average.

The numbers of removed tokens and of spans depend only on the length of the text. All sources of a batch therefore have
equal length, and so do all targets; no padding is needed. Text and removed spans alternate; text comes first.
"""

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.kernels.example_rng import random_integers, random_subset


def sentinel(number: int) -> str:
    """Return T5's name of the sentinel token of span `number`."""
    return f"<extra_id_{number}>"


def span_counts(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the number of removed tokens and the number of spans for a text of `length` tokens."""
    cut = min(max(round(length * rate), 1), length - 1)
    return cut, min(max(round(cut / mean_span), 1), cut, length - cut)


def lengths(text: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the numbers of source and target tokens of a text, including sentinels and one end token each."""
    cut, spans = span_counts(text, rate, mean_span)
    return text - cut + spans + 1, cut + spans + 1


def text_length(length: int, rate: float, mean_span: float) -> int:
    """Return the length of the longest text whose source and target have at most `length` tokens.

    Raises UsageError if even a text of 2 tokens is too long.
    """
    text = 2
    if max(lengths(text, rate, mean_span)) > length:
        raise UsageError(f"data.length is {length}, too short to remove spans", fix="set data.length to 3 or more")
    while max(lengths(text + 1, rate, mean_span)) <= length:
        text += 1
    return text


def corrupt_spans(
    tokens: np.ndarray, keys: np.ndarray, cut: int, spans: int, sentinels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Replace spans of texts by sentinel tokens. Return the sources and the targets.

    Texts are (b, n), sources (b, n - cut + spans), targets (b, cut + spans). Each text loses `cut` tokens in `spans`
    spans. In the source a sentinel replaces each span. In the target the sentinel precedes the span. `keys` (b,) seed
    the positions; all ways to divide text and spans are equally likely.
    """
    b, n = tokens.shape
    kept_parts = _parts(keys, n - cut, spans, skip=0)
    cut_parts = _parts(keys, cut, spans, skip=n - cut)
    ends = np.stack((kept_parts, cut_parts), axis=2).reshape(b, 2 * spans).cumsum(axis=1)
    begins = np.zeros((b, n + 1), dtype=np.int64)
    np.put_along_axis(begins, ends, 1, axis=1)
    begins[:, 0] = 1
    part = begins[:, :n].cumsum(axis=1) - 1  # even parts are text, odd parts are spans
    first, is_cut, marks = begins[:, :n] == 1, part % 2 == 1, sentinels[part // 2]
    source = np.where(is_cut, marks, tokens)[~is_cut | first]
    # in the target, the first token of each text part becomes the sentinel of the span that follows
    target = np.where(is_cut, tokens, marks)[is_cut | first]
    return source.reshape(b, n - cut + spans), target.reshape(b, cut + spans)


def _parts(keys: np.ndarray, items: int, parts: int, skip: int) -> np.ndarray:
    """Divide `items` at random into `parts` non-empty parts, for each row. Return the sizes of the parts (b, parts)."""
    if parts == 1:
        return np.full((len(keys), 1), items)
    borders = random_subset(random_integers(keys, items - 1, skip), parts - 1) + 1
    return np.diff(borders, axis=1, prepend=0, append=items)
