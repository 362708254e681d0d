"""Held-out text that is also in the training text, which makes the held-out loss too low."""

from collections.abc import Iterable
from hashlib import blake2b

SHORTEST = 40
"""Minimum number of characters of a compared line. Shorter lines are often equal in unrelated texts."""
NOTABLE = 0.05
"""Minimum share of repeated held-out text for a caution."""


def repeated_share(train: Iterable[str], held_out: Iterable[str]) -> float:
    """Return the share of characters of held-out lines that are equal to a line of the training text."""
    sizes: dict[bytes, int] = {}
    for line in _lines(held_out):
        sizes[_digest(line)] = sizes.get(_digest(line), 0) + len(line)
    repeated = {digest for line in _lines(train) if (digest := _digest(line)) in sizes}
    return sum(sizes[digest] for digest in repeated) / max(1, sum(sizes.values()))


def caution_on_repeated(share: float) -> list[str]:
    """Return a caution if more than `NOTABLE` of the held-out text is in the training text."""
    text = f"{share:.0%} of the held-out text is in the training text too, so the held-out loss is too low"
    return [text] if share > NOTABLE else []


def _lines(texts: Iterable[str]) -> Iterable[str]:
    return (line for text in texts for line in map(str.strip, text.splitlines()) if len(line) >= SHORTEST)


def _digest(line: str) -> bytes:
    return blake2b(line.encode(errors="surrogatepass"), digest_size=12).digest()
