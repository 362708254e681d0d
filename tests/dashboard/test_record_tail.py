"""Reader of appended lines: every complete line is read once."""

import os

from hypothesis import given
from hypothesis import strategies as st

from thrifty.reporting.file_tail import FileTail

LINES = st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b" ")), max_size=30)


@given(lines=LINES, cuts=st.lists(st.integers(0, 400), max_size=8), chunk=st.integers(14, 64))
def test_every_complete_line_is_read_once(tmp_path_factory, lines, cuts, chunk):
    file = tmp_path_factory.mktemp("tail") / "records.jsonl"
    content = b"".join(line + b"\n" for line in lines)
    tail, read = FileTail(file, chunk=chunk), []
    for end in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
        with file.open("ab") as opened:
            opened.write(content[file.stat().st_size : end])
        while new := tail.read():
            read += new
    assert read == lines and tail.left_out == tail.restarts == 0


def test_an_incomplete_line_is_read_when_complete(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b"one\ntw")
    tail = FileTail(file)
    assert tail.read() == [b"one"] and tail.read() == []
    with file.open("ab") as opened:
        opened.write(b"o\n")
    assert tail.read() == [b"two"]


def test_a_line_longer_than_a_chunk_is_skipped_and_counted(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b"a\n" + b"x" * 100 + b"\nb\nc\n")
    tail, read = FileTail(file, chunk=16), []
    while lines := tail.read():
        read += lines
    assert read == [b"a", b"b", b"c"] and tail.left_out == 1 and tail.offset == tail.size


def test_a_replaced_or_truncated_file_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b"old 1\nold 2\n")
    tail = FileTail(file)
    tail.read()
    new = tmp_path / "new"
    new.write_bytes(b"new 1\nnew 2\nnew 3\n")
    os.replace(new, file)
    assert tail.read() == [b"new 1", b"new 2", b"new 3"] and tail.restarts == 1
    file.write_bytes(b"short\n")
    assert tail.read() == [b"short"] and tail.restarts == 2


def test_a_file_rewritten_in_place_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b"old 1\n")
    tail = FileTail(file)
    tail.read()
    file.write_bytes(b"new 1\nnew 2\n")  # rewritten in place, so the inode number stays
    assert tail.read() == [b"new 1", b"new 2"]


def test_skipping_into_a_line_continues_with_the_next(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b"first\nsecond\nthird\n")
    tail = FileTail(file)
    tail.skip_to(8)
    assert tail.read() == [b"third"]


def test_a_missing_file_has_no_lines(tmp_path):
    tail = FileTail(tmp_path / "records.jsonl")
    assert tail.read() == [] and tail.size == 0
    tail.file.write_bytes(b"now\n")
    assert tail.read() == [b"now"]


def test_a_pipe_or_device_has_no_lines(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        assert FileTail(tmp_path / name).read() == [] and FileTail(tmp_path / name).size == 0
