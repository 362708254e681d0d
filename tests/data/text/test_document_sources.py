import json
import os
import sys
from pathlib import Path

import pytest

from thrifty.core.errors import UsageError
from thrifty.data.text.document_sources import open_source
from thrifty.data.text.passage_split import LONGEST, PASSAGE


def read(source, column="text"):
    return list(open_source(str(source), column).documents())


def refused(source, column="text"):
    with pytest.raises(UsageError) as caught:
        read(source, column)
    return str(caught.value)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_paragraphs_are_merged_into_passages(tmp_path):
    paragraphs = [f"Paragraph {number}. " + "word " * 100 for number in range(40)]
    passages = read(write(tmp_path / "a.txt", "\n\n".join(paragraphs)))
    assert all(len(passage) >= PASSAGE for passage in passages[:-1])
    assert "\n\n".join(passages) == "\n\n".join(paragraphs)
    assert len(passages) == 10


def test_text_without_blank_lines_is_cut_at_line_ends(tmp_path):
    lines = [f"line {number} " + "x" * 90 for number in range(1000)]
    passages = read(write(tmp_path / "a.txt", "\n".join(lines)))
    assert "\n".join(passages) == "\n".join(lines)
    assert max(map(len, passages)) <= LONGEST + 100


def test_windows_line_ends_and_byte_order_mark_vanish(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")) == ["one\ntwo"]


def test_json_lines_yield_their_column(tmp_path):
    rows = [{"text": "one\ntwo", "id": 1}, {"text": None}, {"text": "  "}, {"text": "three"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(path) == ["one\ntwo", "three"]


def test_parquet_yields_its_column(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"story": ["one", None, "two", " "], "n": [1, 2, 3, 4]}), path)
    assert read(path, "story") == ["one", "two"]
    message = refused(path)
    assert "no column 'text'; there are: n, story" in message and "data.column=story" in message.replace('": "', "=")
    assert "holds int, not text" in refused(path, "n")


def test_parquet_string_types_and_duplicate_columns(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.array(["one", None, "two", "one"])
    for number, column in enumerate((texts.dictionary_encode(), texts.cast(arrow.string_view()))):
        parquet.write_table(arrow.table({"text": column}), tmp_path / f"{number}.parquet")
        assert read(tmp_path / f"{number}.parquet") == ["one", "two", "one"]
    parquet.write_table(arrow.table([texts, texts], names=["text", "text"]), tmp_path / "twice.parquet")
    assert "twice.parquet: several columns are called 'text'" in refused(tmp_path / "twice.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    assert "a.parquet' is not a readable Parquet file" in refused(write(tmp_path / "a.parquet", b"PAR1 broken"))


def test_error_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'thrifty[parquet]'" in refused(write(tmp_path / "a.parquet", b"PAR1"))


def test_folder_yields_sorted_text_files_as_documents(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "2.txt", "two\n\nstill two\n")
    write(tmp_path / "a.md", "one")
    write(tmp_path / "c.jsonl", '{"text": "three"}\n{"text": "four"}\n')
    write(tmp_path / "picture.png", b"\x89PNG\0\0")
    write(tmp_path / ".hidden", "secret")
    write(tmp_path / "empty.txt", "")
    assert read(tmp_path) == ["one", "three", "four", "two\n\nstill two"]


def test_a_folder_without_text_is_refused(tmp_path):
    assert "no files" in refused(tmp_path)
    write(tmp_path / "picture.png", b"\x89PNG\0\0")
    assert f"no text, and 1 files are left out: {tmp_path}/picture.png: binary data" in refused(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    assert f"'{tmp_path}/no.txt': no such file" in refused(tmp_path / "no.txt")


def test_binary_data_is_refused_with_its_line(tmp_path):
    assert "a.txt, line 2: binary data" in refused(write(tmp_path / "a.txt", b"fine\nnot\0fine\n"))


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    message = refused(write(tmp_path / "a.txt", "fine\ncafé\n".encode("latin-1")))
    assert "a.txt, line 2: byte 0xe9 is not UTF-8" in message and "iconv" in message


@pytest.mark.parametrize(
    ("name", "command"), [("a.csv.gz", "gunzip -k"), ("a.jsonl.zst", "zstd -d"), ("my texts.zip", "unzip")]
)
def test_compressed_files_are_refused_with_a_command(tmp_path, name, command):
    message = refused(write(tmp_path / name, b"\x1f\x8b\0"))
    assert f"{name}: compressed files are not read" in message and f"fix: {command} " in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "cut', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: a JSON list, not an object"),
        ('{"body": "x", "id": 3}', "line 2: no column 'text'; there are: body, id"),
        ("{}", "there are: none"),
        ('{"text": ["x"]}', "line 2: column 'text' holds list, not text"),
        ('{"text": "\\ud800"}', "line 2: column 'text' holds half of a surrogate pair"),
        ("[" * 100_000, "line 2: not valid JSON"),
    ],
)
def test_bad_json_lines_are_refused_with_file_and_line(tmp_path, line, says):
    message = refused(write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n'))
    assert "a.jsonl" in message and says in message


def test_an_unknown_name_gets_a_suggestion():
    assert "did you mean 'kjv'?" in refused("kvj")
    assert "choose one of:" in refused("qqqqqqqq") and "python-stdlib" in refused("qqqqqqqq")


def test_a_model_is_not_text():
    assert "'smollm2-135m' is a pretrained model" in refused("smollm2-135m")


def test_missing_set_is_refused_with_its_command():
    assert "fix: thrifty data get kjv" in refused("kjv")


def test_known_set_precedes_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kjv").mkdir()
    write(tmp_path / "kjv" / "a.txt", "mine")
    assert "thrifty data get kjv" in refused("kjv")
    assert read("./kjv") == ["mine"]


def test_identity_follows_changes(tmp_path):
    path = write(tmp_path / "a.txt", "one")
    before = open_source(str(path)).identity()
    assert open_source(str(path)).identity() == before
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert open_source(str(path)).identity() != before


def test_hub_data_set_is_read_by_name(tmp_path, monkeypatch):
    """A local folder of that name is read as the data set, so that no network is required."""
    pytest.importorskip("datasets")
    for package in ("datasets.config", "huggingface_hub.constants"):  # which would request missing files
        monkeypatch.setattr(f"{package}.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "me" / "tales").mkdir(parents=True)
    write(tmp_path / "me" / "tales" / "train.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    assert read("hub:me/tales") == ["one", "two"]
    assert "hub:me/tales: no column 'body'; there are: text" in refused("hub:me/tales", "body")
    assert "hub:me/absent cannot be read" in refused("hub:me/absent")


def test_error_without_datasets_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'thrifty[hub]'" in refused("hub:owner/name")


@pytest.mark.parametrize(("damage", "by"), [(b"\xff", b"sixth"), (b"\xff\xff\xff\x7f", (6 * 5).to_bytes(4, "little"))])
def test_damaged_saved_dataset_is_refused(damage: bytes, by: bytes, tmp_path: Path) -> None:
    """The damage is a byte that is no UTF-8, or an offset beyond the end of the file."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["first", "secnd", "third", "forth", "fifth", "sixth"]}).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    content = file.read_bytes()
    place = content.rindex(by)
    file.write_bytes(content[:place] + damage + content[place + len(damage) :])
    assert f"{file}' is not a readable Arrow file" in (printed := refused(tmp_path)) and "save_to_disk" in printed


@pytest.mark.parametrize("splits", [False, True])
def test_saved_dataset_is_read_as_rows(splits: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "", "two"], "body": [1, 2, 3]})
    saved = datasets.DatasetDict({"train": rows, "test": rows.select([0])}) if splits else rows
    saved.save_to_disk(tmp_path / "saved")
    assert read(str(tmp_path / "saved")) == ["one", "two"]
    assert "no column 'texts'" in refused(str(tmp_path / "saved"), "texts")
    assert "column 'body' holds int, not text" in refused(str(tmp_path / "saved"), "body")
    before = open_source(str(tmp_path / "saved")).identity()
    datasets.Dataset.from_dict({"text": ["three"], "body": [1]}).save_to_disk(tmp_path / "other")
    assert open_source(str(tmp_path / "other")).identity() != before
    (tmp_path / "more.txt").write_text("more")
    assert read(tmp_path) == ["more", "three", "one", "two"]  # the descriptions of the data sets are not read as text


def test_a_damaged_folder_of_a_saved_dataset_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    datasets.DatasetDict({"dev": rows}).save_to_disk(tmp_path / "dev")
    assert "has the splits dev, but no split called train" in refused(tmp_path / "dev")
    rows.save_to_disk(tmp_path / "cut")
    (tmp_path / "cut" / "data-00000-of-00001.arrow").unlink()
    assert "cut cannot be read: data-00000-of-00001.arrow is missing" in refused(tmp_path / "cut")
    (tmp_path / "cut" / "state.json").write_text("{}")
    assert "its description is damaged" in refused(tmp_path / "cut")


def test_saved_dataset_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'thrifty[parquet]'" in refused(tmp_path)
