"""Splitting of running text into documents at blank lines."""

from collections.abc import Iterable, Iterator

from thrifty.data.tokenizer import text_pieces

PASSAGE = 2_000
"""Minimum number of characters in a passage. The last passage may be shorter."""
LONGEST = 10 * PASSAGE
"""Number of characters after which text without blank lines is cut at the next end of line.

A passage of more than twice this number is cut between words.
"""


def passages(lines: Iterable[str]) -> Iterator[str]:
    """Join paragraphs (separated by blank lines) to passages of at least PASSAGE characters, and yield them."""
    pending: list[str] = []
    size = 0
    for line in lines:
        pending.append(line)
        size += len(line) + 1
        if (size >= PASSAGE and not line.strip()) or size >= LONGEST:
            yield from _cut(pending)
            pending, size = [], 0
    yield from _cut(pending)


def _cut(lines: Iterable[str]) -> Iterator[str]:
    return (piece for text in joined(lines) for piece in text_pieces(text, 2 * LONGEST))


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines as one text, or nothing if they contain only white space."""
    text = "\n".join(lines).strip("\n")
    if text.strip():
        yield text
