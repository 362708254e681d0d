"""Tables as people have them: exports of spreadsheets, of pandas and of datasets."""

import csv
import json
import tracemalloc
from pathlib import Path

import pytest

from thrifty.core.errors import UsageError
from thrifty.data.text import row_tables
from thrifty.data.text.document_sources import open_source
from thrifty.data.text.row_tables import first_row, open_table

ODD = ["plain", 'says "so", twice', "two\nlines\r\nthree", "semi;colon\ttab", " spaces ", "日本語, naïve", "'"]


def rows(path: Path) -> list[dict[str, str]]:
    return [dict(row) for _, row in open_table(path).rows]


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_quoted_values_are_read_with_any_delimiter(tmp_path: Path, delimiter: str, encoding: str) -> None:
    path = tmp_path / ("a.tsv" if delimiter == "\t" else "a.csv")
    expected = [{"id": str(number), "text": text} for number, text in enumerate(ODD)]
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(expected)
    assert rows(path) == expected


def test_spreadsheet_export_is_read(tmp_path: Path) -> None:
    """The export declares its delimiter, ends lines as Windows does, and has columns without a name and blank rows."""
    path = write(tmp_path / "a.csv", "sep=;\r\nText;Stars;\r\nSo, so;3;\r\n;;\r\n\r\nGood;5;\r\n")
    assert rows(path) == [{"Text": "So, so", "Stars": "3"}, {"Text": "", "Stars": ""}, {"Text": "Good", "Stars": "5"}]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("id,text\n1,so\n2,a,b\n", r"a\.csv, line 3: the number of columns differs from the heading, 3 instead of 2"),
        ('id,text\n1,so\n2,"open\n3,x\n', "is not a readable table: line 3: a quoted value does not end"),
        ('id,text\n1,"so" it goes\n', "line 2: text follows the end of a quoted value\n.*twice"),
        ("text,text\na,b\n", "several columns are called 'text'"),
        ("text\nfine\ncaf\xe9\n", r"line 3: byte 0xe9 is not UTF-8 text\n.*iconv -f CP1252"),
        ("so good;1\nso bad;0\n", r"line 2: no column 'text'; there are: 1, so good\n.*begin the file with a line of"),
        ("id,review,stars\n1,quite good,3\n", r'there are: id, review, stars\n.*"data.column": "review"'),
    ],
)
def test_damage_of_csv_is_refused_with_its_line(tmp_path: Path, content: str, match: str) -> None:
    path = write(tmp_path / "a.csv", content, "latin-1")
    with pytest.raises(UsageError, match=match):
        list(open_source(str(path)).documents())


def test_utf16_file_is_refused_with_its_conversion(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,text\n1,so\n", "utf-16")
    with pytest.raises(UsageError, match=r"line 1: UTF-16 text, not UTF-8 text\n.*iconv -f UTF-16 -t UTF-8"):
        rows(path)


def test_json_file_is_a_list_or_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [{"text": "one"}, {"text": "two"}]
    assert rows(write(tmp_path / "list.json", json.dumps(expected, indent=1))) == expected
    assert rows(write(tmp_path / "lines.json", "\n".join(map(json.dumps, expected)))) == expected
    monkeypatch.setattr(row_tables, "LONGEST_LINE", 20)
    with pytest.raises(UsageError, match=r"must be read as a whole; the limit.*\n.*jq -c '\.\[\]' list\.json"):
        rows(tmp_path / "list.json")


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "a.jsonl", "a.json"):
        path = write(tmp_path / name, "" if name != "a.json" else "[]")
        assert rows(path) == [] and first_row(path) == {}
        with pytest.raises(UsageError, match="has no text to train on"):
            row_tables_text(path)


def row_tables_text(path: Path) -> None:
    from thrifty.data.train_split import plan_split

    plan_split(open_source(str(path)).documents(), 0.1, str(path))


def test_a_long_csv_requires_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w") as file:
        file.write("id,text\n")
        file.writelines(f'{number},"row {number}, with some text"\n' for number in range(20_000))
    tracemalloc.start()
    count = sum(1 for _ in open_source(str(path)).documents())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak < 1e6


def test_a_folder_mixes_formats_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.csv", "text;id\ntwo;1\n")
    write(tmp_path / "c.jsonl", '{"text": "three"}')
    write(tmp_path / "d.tsv", "id\ttext\n1\tfour\n")
    write(tmp_path / "e.json", '{"settings": 1}')
    write(tmp_path / "f.txt", "caf\xe9", "latin-1")
    write(tmp_path / "g.csv", "id;text\n1;caf\xe9\n", "latin-1")
    write(tmp_path / "h.txt", "UTF-16", "utf-16")
    write(tmp_path / "i.csv", "review\nfive\n")
    write(tmp_path / "j.csv.gz", "\x1f\x8b\0", "latin-1")
    write(tmp_path / "k.png", "\x89PNG\0", "latin-1")
    source = open_source(str(tmp_path))
    for _ in range(2):
        assert list(source.documents()) == ["one", "two", "three", "four", '{"settings": 1}']
        left_out = source.left_out()
        assert left_out.startswith("6 files are left out: ") and "\n" not in left_out
    for name in ("h.txt: UTF-16 text", "j.csv.gz: compressed", "k.png: binary data", "f.txt: line 1: byte 0xe9"):
        assert f"{tmp_path}/{name}" in left_out
    assert list(open_source(str(tmp_path), "review").documents()) == ["one", '{"settings": 1}', "five"]


def test_a_folder_without_the_column_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.csv", "review;stars\nso;3\n")
    source = open_source(str(tmp_path))
    with pytest.raises(UsageError, match=r"3 files are left out: .*0\.csv: line 2: no column 'text'; there are: rev"):
        list(source.documents())
