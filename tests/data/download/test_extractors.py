import gzip
import json

import pytest

from thrifty.data.download import text_extractors

BIBLE = '''
from somewhere import Bible, Version
raise SystemExit("a package's code is never run")
bible = Bible(
    Version.ANY,
    """
In the beginning. And the earth [was] void.
Thus they were finished.""",
    {1001001: 1, 1001002: 19, 1002001: 45},
    {1001001: 18, 1001002: 44, 1002001: 69},
    {},
)
'''


def test_chapters_are_read_without_running_the_module():
    documents = list(text_extractors.chapters({"m.py": BIBLE.encode()}))
    assert documents == ["In the beginning. And the earth was void.", "Thus they were finished."]


def test_each_whole_file_is_a_document():
    assert list(text_extractors.whole_files({"a": b"one\r\ntwo\n", "b": "café".encode()})) == ["one\ntwo", "café"]


def test_a_book_is_cut_at_its_chapters():
    book = b"ETYMOLOGY.\n\nCHAPTER 1. Loomings.\n\nCall me\nCHAPTER 2. The Bag.\nI stuffed"
    assert list(text_extractors.book_chapters({"b": book})) == [
        "ETYMOLOGY.",
        "CHAPTER 1. Loomings.\n\nCall me",
        "CHAPTER 2. The Bag.\nI stuffed",
    ]


def test_flattened_novels_have_paragraphs_and_no_licence():
    novel = "   A TALE    Once.  Twice.   " + "word " * 500 + "    The Project Gutenberg licence" + " and so on" * 250
    assert list(text_extractors.flattened_novels({"n": novel.encode()})) == [
        "A TALE\n\nOnce. Twice.\n\n" + ("word " * 500).strip()
    ]


def test_reviews_have_line_ends_for_breaks():
    table = b'text,label,source\n"Good.<br /><br />Very ""good"".",1,imdb\nBad,0,rt\n'
    assert list(text_extractors.review_table({"t": table})) == ['Good.\n\nVery "good".', "Bad"]
    listing = json.dumps([{"t": "Good.<br />Yes."}, {"t": "Bad"}, {"t": "Bad"}]).encode()
    assert list(text_extractors.review_list({"t": listing})) == ["Good.\nYes.", "Bad"]


def test_dialogues_name_their_speakers():
    def message(who, text):
        return {"sender": who, "text": text}

    logs = {
        "1": {"messages": [[message("x", "Hi "), message("x", "there")], [message("y", "Yo")]]},
        "2": {"messages": []},
    }
    assert list(text_extractors.dialogues({"d": json.dumps(logs).encode()})) == ["A: Hi\nA: there\nB: Yo"]


def test_service_descriptions_lose_html_and_repetition():
    one = {
        "documentation": "<p>Lists <b>all</b> &amp; more.</p><p>Fast.</p>",
        "shapes": {"a": [{"documentation": "x"}]},
    }
    two = {"documentation": "x", "operations": {"documentation": {"documentation": "y"}}}
    members = {name: gzip.compress(json.dumps(value).encode()) for name, value in (("a", one), ("b", two))}
    assert list(text_extractors.service_descriptions(members)) == ["Lists all & more. Fast.\nx", "y"]


@pytest.mark.parametrize("module", [b"import os", b"bible = Bible(1"])
def test_module_without_literals_fails(module):
    with pytest.raises((StopIteration, RuntimeError, SyntaxError)):
        list(text_extractors.chapters({"m.py": module}))
