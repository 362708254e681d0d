"""`thrifty data look` at images, with labels, without, or with captions."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from thrifty.cli.verb_output import print_words
from thrifty.reporting.number_format import percent, significant, whole

if TYPE_CHECKING:
    from thrifty.core.recipe import DataSettings
    from thrifty.data.images.image_inspection import ImageSummary
    from thrifty.data.pairs.pair_inspection import PairSummary


def print_image_inspection(settings: "DataSettings", examples: int, as_json: bool) -> bool:
    """Whether a source holds images, or images with captions, for the most part; it has then been told about."""
    from thrifty.data.images.image_data import holds_mainly_images
    from thrifty.data.images.image_inspection import inspect_images
    from thrifty.data.pairs.pair_data import holds_image_pairs
    from thrifty.data.pairs.pair_inspection import inspect_pairs
    from thrifty.data.text.text_data import print_to_stderr

    if holds_image_pairs(settings.source):
        seen = inspect_pairs(settings, examples, print_to_stderr)
        rows = _of_pairs(seen)
    elif holds_mainly_images(settings.source):
        seen = inspect_images(settings, print_to_stderr)
        rows = _of_images(seen)
    else:
        return False
    print_words(asdict(seen), lambda: "\n".join(rows), as_json)
    return True


def _of_images(seen: "ImageSummary") -> list[str]:
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


def _of_pairs(seen: "PairSummary") -> list[str]:
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
    """The first of the files that are left out, and how the others are to be had."""
    from thrifty.data.skipped_files import TOLD

    where = "which --json names" if len(names) == count else f"of which --json names {len(names) - TOLD:,}"
    more = [f"  and {count - TOLD:,} more, {where}"] if count > TOLD else []
    return [*(f"  {name}" for name in names[:TOLD]), *more]


def _counts(seen: "ImageSummary | PairSummary") -> list[str]:
    return [
        f"{seen.source}   images of {seen.side} x {seen.side} pixels, {seen.channels} channels",
        f"{'':24}{'train':>10}{'held out':>10}",
        f"{'images':<24}{whole(seen.images['train']):>10}{whole(seen.images['held_out']):>10}",
    ]


def _pixels(seen: "ImageSummary | PairSummary") -> list[str]:
    return [
        "",
        f"mean             {', '.join(map(significant, seen.mean))}",
        f"deviation        {', '.join(map(significant, seen.std))}",
    ]
