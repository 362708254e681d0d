"""Printed summaries of a source of text, images, pairs or conversations."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from thrifty.data.chat.chat_preview import ChatPreview
from thrifty.data.images.image_inspection import ImageSummary
from thrifty.data.pairs.pair_inspection import PairSummary
from thrifty.data.skipped_files import SHOWN
from thrifty.data.text.text_inspection import TextSummary
from thrifty.reporting.number_format import percent, scaled, significant, whole
from thrifty.reporting.printed_result import PrintedResult, lines

BAR = 40
"""Maximum number of characters of a histogram bar."""


@dataclass(frozen=True, repr=False)
class SourceSummary(PrintedResult):
    """Counts, statistics and examples of a source."""

    content: TextSummary | ImageSummary | PairSummary

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.content)

    def __rich__(self) -> RenderableType:
        content = self.content
        if isinstance(content, TextSummary):
            rows = [*_text_counts(content), *_left_out(content), "", *_bars(content), *_titled(content.examples)]
            return lines(*rows)
        return lines(*(_image_rows(content) if isinstance(content, ImageSummary) else _pair_rows(content)))


@dataclass(frozen=True, repr=False)
class ConversationPreview(PrintedResult):
    """Conversations in which the tokens with a loss are between ⟦ and ⟧, and green in a terminal."""

    content: ChatPreview

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.content)

    def __rich__(self) -> RenderableType:
        seen = self.content
        counts = f"{whole(seen.conversations)} conversations, {whole(seen.tokens)} tokens"
        rows: list[RenderableType] = [
            f"{seen.source}   {counts}; with loss: {whole(seen.learned)}, {percent(seen.learned / seen.tokens)}"
        ]
        if seen.cut:
            rows.append(f"{percent(seen.cut)} of the conversations are truncated")
        for number, example in enumerate(seen.examples, start=1):
            spans = [(f"⟦{each.text}⟧", "bold green") if each.learned else each.text for each in example]
            rows += [*_title(number), Text.assemble(*spans)]
        return lines(*rows)


def _text_counts(seen: TextSummary) -> list[str]:
    rows = [f"{seen.source}   (split by {seen.split})", f"{'':12}{'train':>14}{'held out':>14}"]
    for title, counts, show in (
        ("documents", seen.documents, whole),
        ("text", seen.bytes, lambda size: scaled(size, "B")),
        ("tokens", seen.tokens, whole),
    ):
        rows.append(f"{title:<12}{show(counts['train']):>14}{show(counts['held_out']):>14}")
    labels = "for labels: thrifty train --loss classification --set data.label_column=NAME"
    return [
        *rows,
        *([f"\nother columns    {', '.join(seen.other_columns)}; {labels}"] if seen.other_columns else []),
        "",
        f"vocabulary       {whole(seen.vocabulary)}",
        f"bytes per token  {significant(seen.bytes_per_token)}",
        f"unigram entropy  {significant(seen.unigram_entropy)} nats per token",
        f"duplicates       {percent(seen.duplicates)} of the documents",
        f"stored in        {seen.folder}",
    ]


def _left_out(seen: TextSummary) -> list[str]:
    """Return the number of near-duplicates and the least similar pairs. Texts are cut around their first
    difference.
    """
    duplicates = seen.near_duplicates
    if duplicates is None:
        return []
    amount = f"{whole(duplicates['documents'])} documents, {scaled(duplicates['bytes'], 'B')}"
    rows = [f"near-duplicates  {amount} dropped, at least {percent(duplicates['threshold'])} similar to an earlier one"]
    for pair in duplicates["least_alike"]:
        texts = (" ".join(pair[side].split()) for side in ("kept", "left_out"))
        rows += [f"  {percent(pair['similarity'])} similar", *(f"    {text}" for text in texts)]
    return rows


def _bars(seen: TextSummary) -> list[str]:
    highest = max(bucket.documents for bucket in seen.lengths)
    rows = ["documents by length in tokens"]
    for bucket in seen.lengths:
        bar = "█" * round(BAR * bucket.documents / highest)
        rows.append(f"{bucket.low:>9,} – {bucket.high - 1:<11,}{bucket.documents:>9,}  {bar}".rstrip())
    return rows


def _titled(texts: list[str]) -> list[str]:
    return [row for number, text in enumerate(texts, start=1) for row in (*_title(number), text)]


def _title(number: int) -> tuple[str, str]:
    return "", f"── example {number} " + "─" * 60


def _image_rows(seen: ImageSummary) -> list[str]:
    rows = _counts(seen)
    for label, count in seen.labels.get("train", {}).items():
        rows.append(f"  {label:<22}{whole(count):>10}{whole(seen.labels['held_out'][label]):>10}")
    rows += _pixels(seen)
    if seen.label_entropy is None:
        rows.append(f"no labels        {seen.unlabelled}")
    else:
        rows.append(f"label entropy    {significant(seen.label_entropy)} nats per image")
    if seen.left_out:
        rows += [f"left out         {whole(seen.left_out)} files", *_named(seen.named, seen.left_out)]
    return rows


def _pair_rows(seen: PairSummary) -> list[str]:
    rows = [
        *_counts(seen),
        f"{'captions':<24}{whole(seen.captions['train']):>10}{whole(seen.captions['held_out']):>10}",
        *_pixels(seen),
        f"vocabulary       {whole(seen.vocabulary)}",
        f"caption          {significant(seen.tokens_per_caption)} tokens on average, {whole(seen.longest)} at most",
    ]
    if seen.cut:
        rows.append(f"cut              {percent(seen.cut)} of the captions have more than {seen.length} tokens")
    rows += [f"left out         {kind}: {whole(count)}" for kind, count in seen.left_out.items()]
    rows += _named(seen.named, sum(seen.left_out.values()))
    if seen.examples:
        rows += ["", "captions", *(f"  {' | '.join(captions)}" for captions in seen.examples)]
    return rows


def _named(names: list[str], count: int) -> list[str]:
    """Return the first skipped files, and the number of all other skipped files."""
    where = "listed by --json" if len(names) == count else f"of which --json lists {len(names) - SHOWN:,}"
    more = [f"  and {count - SHOWN:,} more, {where}"] if count > SHOWN else []
    return [*(f"  {name}" for name in names[:SHOWN]), *more]


def _counts(seen: ImageSummary | PairSummary) -> list[str]:
    return [
        f"{seen.source}   images of {seen.side} x {seen.side} pixels, {seen.channels} channels",
        f"{'':24}{'train':>10}{'held out':>10}",
        f"{'images':<24}{whole(seen.images['train']):>10}{whole(seen.images['held_out']):>10}",
    ]


def _pixels(seen: ImageSummary | PairSummary) -> list[str]:
    return [
        "",
        f"mean             {', '.join(map(significant, seen.mean))}",
        f"deviation        {', '.join(map(significant, seen.std))}",
    ]
