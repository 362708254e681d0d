"""Extractors of documents from members of packages, one function per known data set.

Each function takes the contents of members by name, in sorted order. It yields documents, or rows of conversations.
Code of packages is never run: Python files are parsed for literals, and archives are read as streams.
"""

import ast
import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from itertools import groupby

from thrifty.data.text.passage_split import passages

Members = Mapping[str, bytes]


def chapters(members: Members) -> Iterator[str]:
    """Yield one document per chapter of a pythonbible module, without brackets around words that translators added."""
    (source,) = members.values()
    text, starts, ends = _bible(source)
    for _, verses in groupby(sorted(starts), key=lambda verse: verse // 1000):
        chapter = list(verses)
        yield re.sub(r"[\[\]]", "", text[starts[chapter[0]] : ends[chapter[-1]]]).strip()


def modern_verses(members: Members) -> Iterator[dict[str, str]]:
    """Yield a row for each verse of two pythonbible modules: an old and a modern translation."""
    old, modern = (_verses(source) for source in members.values())
    for verse in sorted(old.keys() & modern.keys()):
        if old[verse] and modern[verse]:
            yield {"prompt": f"Rewrite in modern English: {old[verse]}", "completion": modern[verse]}


def _verses(source: bytes) -> dict[int, str]:
    """Return each verse on one line, without brackets and with plain apostrophes."""
    text, starts, ends = _bible(source)
    plain = str.maketrans({"[": None, "]": None, "`": "'"})
    return {verse: " ".join(text[starts[verse] : ends[verse]].translate(plain).split()) for verse in starts}


def _bible(source: bytes) -> tuple[str, dict[int, int], dict[int, int]]:
    """Return the text of a pythonbible module, and the start and end of each verse in it.

    The module calls Bible(version, text, starts, ends, ...) with offsets by verse: book * 1e6 + chapter * 1e3 + verse.
    """
    call = next(
        node
        for node in ast.walk(ast.parse(source.decode()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Bible"
    )
    text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    return text, starts, ends


def whole_files(members: Members) -> Iterator[str]:
    """Yield one document per member."""
    for content in members.values():
        yield content.decode("utf-8-sig").replace("\r\n", "\n").strip()


def book_chapters(members: Members) -> Iterator[str]:
    """Yield one document per chapter of a book, the only member. The line of a chapter begins with CHAPTER."""
    (text,) = members.values()
    for chapter in re.split(r"(?m)^(?=CHAPTER )", text.decode("utf-8-sig").replace("\r\n", "\n")):
        if chapter.strip():
            yield chapter.strip()


def flattened_novels(members: Members) -> Iterator[str]:
    """Yield passages of novels, without the license text. The file has one novel per line; spaces replace line ends."""
    (text,) = members.values()
    for novel in text.decode("utf-8-sig").splitlines():
        paragraphs = re.split(r" {3,}", novel)
        spaced = (line for paragraph in paragraphs for line in (re.sub(r" +", " ", paragraph).strip(), ""))
        yield from (passage for passage in passages(spaced) if "Project Gutenberg" not in passage)


def review_table(members: Members) -> Iterator[str]:
    """Yield the column `text` of a CSV table, with HTML line breaks converted to line ends."""
    (table,) = members.values()
    csv.field_size_limit(10**8)
    for row in csv.DictReader(io.StringIO(table.decode())):
        yield _with_line_ends(row["text"])


def review_list(members: Members) -> Iterator[str]:
    """Yield each distinct text in the field `t` of a JSON list of objects."""
    (listing,) = members.values()
    for text in dict.fromkeys(row["t"] for row in json.loads(listing)):
        yield _with_line_ends(text)


def dialogues(members: Members) -> Iterator[str]:
    """Yield one document per dialogue of chat logs, with one line per message and speakers named A, B, …"""
    (logs,) = members.values()
    for dialogue in json.loads(logs).values():
        names: dict[str, str] = {}
        lines = []
        for message in (message for turn in dialogue["messages"] for message in turn):
            speaker = names.setdefault(message["sender"], chr(ord("A") + len(names)))
            lines.append(f"{speaker}: {message['text'].strip()}")
        if lines:
            yield "\n".join(lines)


def service_descriptions(members: Members) -> Iterator[str]:
    """For each gzipped JSON file that describes a web service, yield its new `documentation` texts without HTML."""
    seen: set[str] = set()
    for content in members.values():
        texts = dict.fromkeys(_documentation(json.loads(gzip.decompress(content))))
        if new_texts := [text for text in texts if text not in seen]:
            seen.update(new_texts)
            yield "\n".join(new_texts)


def _documentation(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                if text := _without_html(value):
                    yield text
            else:
                yield from _documentation(value)
    elif isinstance(node, list):
        for value in node:
            yield from _documentation(value)


class _TextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "li", "br", "dt", "dd"):
            self.parts.append(" ")


def _without_html(html: str) -> str:
    parser = _TextParser()
    parser.feed(html)
    parser.close()
    return " ".join("".join(parser.parts).split())


def _with_line_ends(text: str) -> str:
    return re.sub(r"\s*<br\s*/?>\s*", "\n", text).strip()
