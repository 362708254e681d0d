"""Near-duplicate search in the Python sources of this machine, in MB of text per second and core.

Two parts are timed alternately: splitting documents into runs of words, and the whole search with minimum hashes and
the comparison by datasketch.
"""

import sys
from pathlib import Path

from side_by_side import print_timings, side_by_side, write
from thrifty.data.text.document_sources import FileSource
from thrifty.data.text.near_duplicates import KeptDocuments, runs_of_words
from thrifty.data.text.python_sources import python_files

SIZE, THRESHOLD = 4_000_000, 0.8


def main() -> None:
    source = FileSource(python_files(SIZE), folder=True)
    texts = list(source.documents())
    size = sum(len(text.encode()) for text in texts)
    duplicates = KeptDocuments(THRESHOLD).add(source)
    print(f"{len(texts)} documents, {size / 1e6:.1f} MB, {len(duplicates)} of them near-duplicates at {THRESHOLD}")
    ways = {
        "runs of words": lambda: [runs_of_words(text) for text in texts],
        "all of it": lambda: KeptDocuments(THRESHOLD).add(source),
    }
    timings = side_by_side(ways, rounds=3, warmup=0)
    print_timings("near-duplicates", timings, "all of it", size / 1e6, "MB/s")
    if len(sys.argv) > 1:
        rates = {name: size / 1e6 / timing.median for name, timing in timings.items()}
        counts = {"documents": len(texts), "bytes": size, "found": len(duplicates)}
        write(Path(sys.argv[1]), counts | {"mb_per_second": rates})


if __name__ == "__main__":
    main()
