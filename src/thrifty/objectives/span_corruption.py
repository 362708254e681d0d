"""Span corruption: spans of a text are cut out, and the task is to write them, each behind the mark left in its place.

Paper     Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (T5,
          arXiv 1910.10683), section 3.1.4 and table 6: 15 % of the tokens in spans of 3 on average.

How many tokens and spans are cut out depends on the length of the text alone, so that all sources have one length and
all targets another, and nothing is padded. Text and cut-out spans take turns, text first.
"""

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.kernels.example_rng import random_integers, random_subset


def sentinel(number: int) -> str:
    """The name of the mark in the place of a span, by T5's convention."""
    return f"<extra_id_{number}>"


def span_counts(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """How many of a text's tokens are cut out, and in how many spans."""
    cut = min(max(round(length * rate), 1), length - 1)
    return cut, min(max(round(cut / mean_span), 1), cut, length - cut)


def lengths(text: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Tokens of the source and of the target made of a text, one mark for each span and one end in both."""
    cut, spans = span_counts(text, rate, mean_span)
    return text - cut + spans + 1, cut + spans + 1


def text_length(length: int, rate: float, mean_span: float) -> int:
    """Tokens of the longest text of which neither source nor target is longer than `length`.

    Raises UsageError where there is none.
    """
    text = 2
    if max(lengths(text, rate, mean_span)) > length:
        raise UsageError(f"data.length is {length}: too short to cut spans out", fix="set data.length to 3 or more")
    while max(lengths(text + 1, rate, mean_span)) <= length:
        text += 1
    return text


def corrupt_spans(
    tokens: np.ndarray, keys: np.ndarray, cut: int, spans: int, sentinels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Texts (b, n) without `cut` of their tokens (b, n - cut + spans), and these tokens (b, cut + spans), in `spans`
    spans. In the first one sentinel stands in the place of each span, in the second the same one before it.

    `keys` (b,) decide where the spans are: every division of both kinds of token into this many parts is as likely.
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
    # the mark goes before its span: where the text ahead of the span begins, which no target holds otherwise
    target = np.where(is_cut, tokens, marks)[is_cut | first]
    return source.reshape(b, n - cut + spans), target.reshape(b, cut + spans)


def _parts(keys: np.ndarray, items: int, parts: int, skip: int) -> np.ndarray:
    """Sizes of `parts` parts, none empty, into which `items` things in a row are divided at random: (b, parts)."""
    if parts == 1:
        return np.full((len(keys), 1), items)
    borders = random_subset(random_integers(keys, items - 1, skip), parts - 1) + 1
    return np.diff(borders, axis=1, prepend=0, append=items)
