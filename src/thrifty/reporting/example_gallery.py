"""Cards of training examples. A card shows an image or a text with its score and label."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core.secret_redaction import redact_text
from thrifty.reporting.number_format import percent, significant, whole
from thrifty.reporting.run_record import mapping, mappings, number
from thrifty.reporting.run_tables import TextTable

_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")
LONGEST = 400
"""Maximum number of shown characters of a text."""


@dataclass(frozen=True)
class ExampleCard:
    title: str
    picture: str = ""
    text: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardRow:
    """Images shown side by side."""

    title: str
    pictures: tuple[tuple[str, str], ...]
    """Title and data URL of each image."""
    remark: str = ""


def card(example: Mapping[str, Any], title: str = "", remarks: tuple[str, ...] = ()) -> ExampleCard:
    """Return a card for an example in the form of `data.run_data.ExamplePreview`. An invalid image is omitted."""
    picture, text, file = (str(example.get(name) or "") for name in ("picture", "text", "file"))
    index = whole(number(example.get("number")))
    source = redact_text(file) if file else f"example {index}"
    return ExampleCard(
        title=title or redact_text(str(example.get("label") or "")) or f"example {index}",
        picture=picture if _PICTURE.fullmatch(picture) else "",
        text=redact_text(text[:LONGEST] + ("…" if len(text) > LONGEST else "")),
        remarks=(*remarks, source),
    )


def sentence(selection: Mapping[str, Any]) -> str:
    """Return a sentence with the number of kept examples."""
    kept, total = (whole(number(selection.get(name))) for name in ("kept", "examples"))
    return (
        f"{kept} of {total} training examples are kept. If there are scores, both groups (kept and left out) show the "
        "examples with the highest and the lowest scores."
    )


def kept_by_label(selection: Mapping[str, Any]) -> TextTable:
    """Return a table with the number of kept training examples per label."""
    rows = []
    for row in selection.get("labels") or ():
        if isinstance(row, list) and len(row) == 3:
            label, total, kept = redact_text(str(row[0])), number(row[1]), number(row[2])
            share = percent(kept / total) if kept is not None and total else percent(None)
            rows.append((label, whole(total), whole(kept), share))
    return TextTable("Examples kept, by label", ("Label", "All", "Kept", "Share"), rows, frozenset((1, 2, 3)))


def groups(selection: Mapping[str, Any]) -> list[tuple[str, list[ExampleCard]]]:
    """Return the kept and the left-out examples that the run's folder contains for display, as separate groups."""
    shown = []
    for name, examples in mapping(selection.get("shown")).items():
        cards = [card(each, remarks=_scored(each)) for each in mappings(examples)]
        if cards:
            shown.append((redact_text(str(name)), cards))
    return shown


def seen(pictures: Mapping[str, Any]) -> str:
    """Return a sentence that describes the images of the model's predictions."""
    step, about = whole(number(pictures.get("step"))), redact_text(str(pictures.get("about") or ""))
    return f"{about} Held-out examples after step {step}.".strip()


def rows(pictures: Mapping[str, Any]) -> list[CardRow]:
    """Return the images of the model's predictions, one row per example."""
    shown = pictures.get("shown")
    rows = []
    for index, each in enumerate(shown if isinstance(shown, list) else (), start=1):
        images = [
            (redact_text(str(name)), str(address))
            for name, address in mapping(mapping(each).get("pictures")).items()
            if _PICTURE.fullmatch(str(address))
        ]
        if images:
            loss = number(each.get("loss"))
            rows.append(CardRow(f"Example {index}", tuple(images), "" if loss is None else f"loss {significant(loss)}"))
    return rows


def _scored(example: Mapping[str, Any]) -> tuple[str, ...]:
    score = number(example.get("score"))
    return () if score is None else (f"score {significant(score)}",)
