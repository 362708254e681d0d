"""Cutting running text into documents at blank lines."""

from collections.abc import Iterable, Iterator

from thrifty.data.tokenizer import text_pieces

PASSAGE = 2_000
"""Characters that a passage has at least, except the last one."""
LONGEST = 10 * PASSAGE
"""Text without blank lines is cut at the next line end once it has this many characters; between words, if the line
has as many again."""


def passages(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs (separated by blank lines) joined until a passage has at least PASSAGE characters."""
    kept: list[str] = []
    size = 0
    for line in lines:
        kept.append(line)
        size += len(line) + 1
        if (size >= PASSAGE and not line.strip()) or size >= LONGEST:
            yield from _cut(kept)
            kept, size = [], 0
    yield from _cut(kept)


def _cut(lines: Iterable[str]) -> Iterator[str]:
    return (piece for text in joined(lines) for piece in text_pieces(text, 2 * LONGEST))


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines as one text; nothing where they hold only white space."""
    text = "\n".join(lines).strip("\n")
    if text.strip():
        yield text
