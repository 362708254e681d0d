"""Sources with invalid files: each is refused with its position, or left out, counted and named; none hangs."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.text import text_readers
from thrifty.data.text.document_sources import open_source
from thrifty.data.text.passage_split import LONGEST
from thrifty.data.text.token_cache import open_token_cache
from thrifty.data.tokenizer import LONGEST_PIECE, train_tokenizer


def documents(path):
    return list(open_source(str(path)).documents())


def test_unreadable_files_of_a_folder_are_counted_and_named(stories):
    os.mkfifo(stories / "pipe.txt")
    (stories / "nowhere.txt").symlink_to(stories / "absent")
    (stories / "endless.jsonl").symlink_to("/dev/zero")
    (stories / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (stories / "late.txt").write_bytes(b"text\n" * 4000 + b"\0")
    printed = []
    prepared = open_token_cache(DataSettings(source=str(stories), vocabulary=300), printed.append)
    assert sum(prepared.manifest["documents"].values()) == 60
    for _ in range(2):
        assert "5 files are left out" in printed[-1] and len(printed) <= 3
        for name in ("pipe.txt: is not a regular file", "nowhere.txt: is not a file", "latin.txt: line 1: byte 0xef"):
            assert f"{stories}/{name}" in printed[-1]
        open_token_cache(DataSettings(source=str(stories), vocabulary=300), printed.append)


def test_folder_without_readable_files_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match=r"no text, and 1 files are left out: .*pipe\.txt: is not a regular file"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".json", ".tsv"])
def test_a_pipe_and_a_device_are_refused_at_once(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(UsageError, match="not a regular file"):
            open_source(str(tmp_path / f"{name}{suffix}"))


def test_a_line_that_is_too_long_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(text_readers, "LONGEST_LINE", 100)
    (tmp_path / "a.txt").write_text("short\n" + "a" * 200)
    with pytest.raises(UsageError, match=r"a\.txt, line 2: a line of more than"):
        documents(tmp_path / "a.txt")


def test_number_with_too_many_digits_is_refused_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "n": 1' + "0" * 5000 + "}\n")
    with pytest.raises(UsageError, match=r"line 2: not valid JSON \(Exceeds the limit"):
        documents(tmp_path / "a.jsonl")


def test_a_damaged_page_of_parquet_is_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [f"Story {number}: {'and so on ' * number}" for number in range(500)]})
    path = tmp_path / "a.parquet"
    for compression in ("snappy", "gzip", "zstd", "none"):
        parquet.write_table(table, path, compression=compression, write_page_checksum=compression == "none")
        content = bytearray(path.read_bytes())
        content[1000:1400] = bytes(byte ^ 0x5A for byte in content[1000:1400])
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"a\.parquet' is not a readable Parquet file"):
            documents(path)


def test_file_names_that_are_not_utf8(stories, tmp_path):
    name = os.fsencode(stories) + b"/caf\xe9.txt"
    with open(name, "wb") as file:
        file.write(b"A story of its own.")
    settings = DataSettings(source=str(stories), vocabulary=300)
    assert sum(open_token_cache(settings, lambda text: None).manifest["documents"].values()) == 61
    with pytest.raises(UsageError, match=r"data: source has the character '\\udce9'.*\n.*rename the file"):
        DataSettings(source=os.fsdecode(name))


@pytest.mark.slow
def test_one_long_line_requires_little_memory(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("the whale swam past the harbour at dawn, or so they say. " * 60_000)
    rows = [{"text": path.read_text()[:1_700_000] + str(number)} for number in range(2)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = f"""
import resource
from thrifty.core.recipe import DataSettings
from thrifty.data.text.token_cache import open_token_cache
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in ("long.txt", "long.jsonl"):
    open_token_cache(DataSettings(source={str(tmp_path)!r} + "/" + name, vocabulary=400), print)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout.split()[-1]) < 40 * 3.4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the whale swam, past 12 harbours; it's naïve\n\n  日本語 " * 20], 400)


def test_long_text_is_tokenized_in_groups_of_short_pieces(tokenizer):
    groups = []

    def encode(pieces, **options):
        groups.append(pieces)
        return inner.encode_batch_fast(pieces, **options)

    inner, tokenizer.inner = tokenizer.inner, SimpleNamespace(encode_batch_fast=encode)
    try:
        assert len(tokenizer.encode("the whale swam " * 100_000)) > 100_000
    finally:
        tokenizer.inner = inner
    assert len(groups) == 2 and max(len(piece) for group in groups for piece in group) <= LONGEST_PIECE


@settings(max_examples=30)
@given(words=st.lists(st.sampled_from(["whale ", "it's", "\n", "  ", "12,", "harbour;", "日本語", "。", "_a", "é"])))
def test_long_text_has_the_same_tokens_as_uncut(tokenizer, words):
    text = "".join(words) * 100 + "the end"
    assert tokenizer.encode(text) == tokenizer.inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_without_spaces_is_trained_on_in_pieces(tokenizer):
    start = time.process_time()
    text = "".join(f"{number:x}z" for number in range(20_000))
    trained = train_tokenizer([text], 400)
    assert time.process_time() - start < 10 and len(text) > 40 * LONGEST_PIECE
    assert trained.decode(trained.encode(text)) == text


def test_long_line_is_cut_between_words(tmp_path):
    line = "the whale swam past " * 10_000
    (tmp_path / "a.txt").write_text(f"short\n\n{line}\n\nlast")
    *cut, last = documents(tmp_path / "a.txt")
    assert "".join(cut) == f"short\n\n{line}"
    assert len(cut) == 6 and max(map(len, cut)) <= 2 * LONGEST and last == "last"
    assert all(passage.split()[-1] in line.split() for passage in cut)
