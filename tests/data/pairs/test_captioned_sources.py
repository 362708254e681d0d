"""Users' images with captions in every form, and every error in them."""

import base64
import json
import os
import shutil
from pathlib import Path

import pyarrow as arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import write_image
from pyarrow import parquet

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.images import image_listing
from thrifty.data.images.image_arrays import open_arrays
from thrifty.data.pairs.captioned_arrays import clean_caption, read_captions
from thrifty.data.pairs.captioned_cache import prepare_captioned
from thrifty.data.pairs.captioned_sources import holds_captioned, open_captioned
from thrifty.data.prepared_cache import read_manifest
from thrifty.data.train_split import DataSplit

COUNT = 12


def write_images(root: Path, count: int = COUNT, first: int = 0) -> list[Path]:
    """Write noise images of increasing brightness: 0.png, 1.png, …"""
    return [write_image(root / f"{n}.png", 20 + 10 * n, seed=n) for n in range(first, first + count)]


def write_rows(path: Path, rows, encoding: str = "utf-8") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding=encoding)
    return path


def prepared(source, column="text", held_out=0.3):
    """Return the printed messages, the (captions, part) of each image by its shade, and the manifest."""
    printed: list[str] = []
    data_settings = DataSettings(source=str(source), column=column, held_out=held_out)
    folder = prepare_captioned(open_captioned(data_settings.source, column), data_settings, 8, printed.append)
    found = {}
    for part, arrays in open_arrays(folder).items():
        for pixels, captions in zip(arrays.pixels, read_captions(folder, part), strict=True):
            found[round((pixels.mean() - 20) / 10)] = (captions, part)
    return printed, found, read_manifest(folder)


def captions_of(source, **settings):
    return {shade: captions for shade, (captions, _) in prepared(source, **settings)[1].items()}


WANTED = {n: [f"number {n}"] for n in range(COUNT)}


def as_jsonl(root):
    write_images(root / "pixels")
    return write_rows(
        root / "all.jsonl", ({"image": f"pixels/{n}.png", "caption": f"number {n}"} for n in range(COUNT))
    )


def as_base64(root):
    images = write_images(root)
    rows = (
        {"bytes": base64.b64encode(path.read_bytes()).decode(), "text": f"number {n}"} for n, path in enumerate(images)
    )
    table = write_rows(root.parent / "all.jsonl", rows)
    shutil.rmtree(root)
    return table


def as_data_uris(root):
    images = write_images(root)
    uris = (f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in images)
    return write_rows(root / "all.jsonl", ({"image": uri, "captions": [f"number {n}"]} for n, uri in enumerate(uris)))


def as_hub_rows(root):
    images = write_images(root)
    held = ({"bytes": base64.b64encode(path.read_bytes()).decode(), "path": path.name} for path in images[:6])
    rows = [*held, *({"bytes": None, "path": path.name} for path in images[6:])]
    return write_rows(root / "all.jsonl", ({"image": row, "text": f"number {n}"} for n, row in enumerate(rows)))


def as_tsv(root):
    write_images(root)
    (root / "all.tsv").write_text("".join(f"{n}.png\tnumber {n}\n" for n in range(COUNT)))
    return root / "all.tsv"


def as_tsv_with_heading(root):
    write_images(root)
    rows = "".join(f"{n}\tnumber {n}\t{n}.png\r\n" for n in range(COUNT))
    (root / "all.tsv").write_text(f"id\tTitle\tFile_Name\r\n{rows}")
    return root / "all.tsv"


def as_csv(root):
    write_images(root)
    rows = "".join(f'"number {n}";{n}.png\r\n' for n in range(COUNT))
    (root / "all.csv").write_text(f"caption;image\r\n{rows}")
    return root / "all.csv"


def as_parquet_of_bytes(root):
    images = write_images(root)
    table = {"image": [{"bytes": path.read_bytes(), "path": None} for path in images], "also": [b"x"] * COUNT}
    parquet.write_table(arrow.table(table | {"caption": [f"number {n}" for n in range(COUNT)]}), root / "all.parquet")
    return root / "all.parquet"


def as_parquet_of_paths(root):
    images = write_images(root / "pixels")
    table = {"path": [f"pixels/{path.name}" for path in images], "text": [[f"number {n}"] for n in range(COUNT)]}
    parquet.write_table(arrow.table(table), root / "all.parquet")
    return root / "all.parquet"


def as_folder_with_table(root):
    write_images(root / "pixels")
    rows = ({"file_name": f"pixels/{n}.png", "text": f"number {n}"} for n in range(COUNT))
    write_rows(root / "metadata.jsonl", rows)
    return root


def as_folder_of_both(root):
    for n, path in enumerate(write_images(root / "deeper")):
        path.with_suffix(".txt").write_text(f"number {n}\n")
    return root


def as_list_in_order(root):
    write_images(root)
    names = sorted(path.name for path in root.iterdir())
    (root / "captions.txt").write_text("".join(f"number {Path(name).stem}\n" for name in names))
    return root


WAYS = (
    as_jsonl, as_base64, as_data_uris, as_hub_rows, as_tsv, as_tsv_with_heading, as_csv, as_parquet_of_bytes,
    as_parquet_of_paths, as_folder_with_table, as_folder_of_both, as_list_in_order,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_form_of_captions_yields_the_same_pairs(way, tmp_path):
    source = way(tmp_path / "set")
    printed, found, manifest = prepared(source)
    assert {shade: captions for shade, (captions, _) in found.items()} == WANTED
    assert {part for _, part in found.values()} == set(DataSplit)
    assert holds_captioned(str(source)) and manifest["left_out"] == {}
    assert len(printed) == 1 and prepared(source)[0] == []  # decoded once


def test_same_image_is_on_the_same_side_in_every_form(tmp_path):
    sides = [
        {shade: part for shade, (_, part) in prepared(way(tmp_path / way.__name__ / "set"))[1].items()} for way in WAYS
    ]
    assert all(own == sides[0] for own in sides)


def test_caption_column_of_another_name(tmp_path):
    write_images(tmp_path)
    rows = ({"image": f"{n}.png", "caption": "wrong", "alt": f"number {n}"} for n in range(COUNT))
    assert captions_of(write_rows(tmp_path / "all.jsonl", rows), column="alt") == WANTED


def test_rows_of_one_image_are_distinct_captions(tmp_path):
    images = write_images(tmp_path)
    rows = [{"image": path.name, "caption": f"number {n}"} for n, path in enumerate(images)]
    rows += [{"image": "./3.png", "caption": ["three", "number 3"]}, {"image": "3.png", "caption": "drei"}]
    found = captions_of(write_rows(tmp_path / "all.jsonl", rows))
    assert found == WANTED | {3: ["number 3", "three", "drei"]}


def test_an_image_stays_in_the_part_where_it_was_first(tmp_path):
    images = write_images(tmp_path)
    rows = [{"image": path.name, "caption": f"number {n}", "split": "train"} for n, path in enumerate(images)]
    rows[4]["split"] = rows[5]["split"] = "test"
    rows.append({"image": "3.png", "caption": "of another part", "split": "test"})
    data = write_rows(tmp_path / "all.jsonl", rows)
    assert "of another part" not in str(captions_of(data))


def test_copies_among_bytes_are_one_image(tmp_path):
    content = [path.read_bytes() for path in write_images(tmp_path)]
    table = {"bytes": [*content, content[5]], "caption": [*(f"number {n}" for n in range(COUNT)), "five"]}
    parquet.write_table(arrow.table(table), tmp_path / "all.parquet")
    assert captions_of(tmp_path / "all.parquet") == WANTED | {5: ["number 5", "five"]}


def test_parts_of_a_captioned_source_are_used(tmp_path):
    images = write_images(tmp_path / "rows")
    parts = ["train", "Validation", None]
    rows = [{"image": path.name, "caption": "x", "split": parts[n % 3]} for n, path in enumerate(images)]
    _, found, _ = prepared(write_rows(tmp_path / "rows" / "all.jsonl", rows), held_out=0.0001)
    assert [shade for shade, (_, part) in sorted(found.items()) if part is DataSplit.HELD_OUT] == [1, 4, 7, 10]
    for part, first in (("train", 0), ("val", 8)):
        root = tmp_path / "set" / part
        for path in write_images(root, 4, first):
            path.with_suffix(".txt").write_text("x")
    _, found, _ = prepared(tmp_path / "set")
    assert [shade for shade, (_, part) in sorted(found.items()) if part is DataSplit.HELD_OUT] == [8, 9, 10, 11]
    rows[4]["split"] = "tset"
    with pytest.raises(UsageError, match=r"line 5: 'split' is 'tset'") as refused:
        prepared(write_rows(tmp_path / "rows" / "all.jsonl", rows))
    assert "test" in refused.value.fix


def test_a_cached_folder_belongs_to_its_known_parts(tmp_path, monkeypatch):
    for part, first in (("train", 0), ("val", 8)):
        for path in write_images(tmp_path / part, 4, first):
            path.with_suffix(".txt").write_text("x")
    source = open_captioned(str(tmp_path), "")
    before = source.identity()
    assert source.identity() == before
    known = {name: part for name, part in image_listing.PART_FOLDERS.items() if name != "val"}
    monkeypatch.setattr(image_listing, "PART_FOLDERS", known)  # as in a version that does not know the name
    assert source.identity() != before


def test_incomplete_pairs_are_counted_and_named(tmp_path):
    images = write_images(tmp_path)
    for n, path in enumerate(images[3:], start=3):
        path.with_suffix(".txt").write_text(f"number {n}")
    images[3].with_suffix(".txt").write_text(" \n\t\n")
    images[4].with_suffix(".txt").write_bytes("Straße".encode("latin1"))
    (tmp_path / "alone.txt").write_text("a caption of nothing")
    images[5].write_bytes(b"")
    images[6].write_bytes(images[7].read_bytes()[:60])
    printed, found, manifest = prepared(tmp_path)
    assert {shade: captions for shade, (captions, _) in found.items()} == {n: WANTED[n] for n in range(7, COUNT)}
    assert manifest["left_out"] == {
        "captions without an image": 1,
        "images without a caption": 4,
        "images or captions that cannot be read": 3,
    }
    message = "\n".join(printed)
    for each in ("alone.txt: no image", "0.png: no caption", "3.png: no caption", "5.png: it is empty", "6.png: it is"):
        assert each in message
    assert "4.txt: byte 0xdf is not UTF-8 text" in message


def test_rows_with_missing_images_are_counted_and_named(tmp_path):
    write_images(tmp_path)
    rows = [{"image": f"{n}.png", "caption": f"number {n}"} for n in range(COUNT)]
    rows += [{"image": "gone.png", "caption": "x"}, {"image": None, "caption": "x"}]
    rows += [{"image": "https://example.org/a.png", "caption": "x"}, {"image": "a\0.png", "caption": "x"}]
    rows += [{"bytes": "no base64!", "caption": "x"}, {"image": "0.png", "caption": None}]
    printed, found, manifest = prepared(write_rows(tmp_path / "all.jsonl", rows))
    assert {shade: captions for shade, (captions, _) in found.items()} == WANTED
    assert manifest["left_out"] == {"captions without an image": 2, "images or captions that cannot be read": 3}
    message = "\n".join(printed)
    assert "gone.png: no such file" in message and "not downloaded" in message and "its base64 is damaged" in message


def test_source_is_refused_only_if_no_pair_is_left(tmp_path):
    write_images(tmp_path / "half", 2)
    (tmp_path / "half" / "captions.tsv").write_text("7.png\tx\n8.png\ty\n")
    with pytest.raises(UsageError, match=r"without an image: 2, images without a caption: 2.*no image is left"):
        prepared(tmp_path / "half")


def test_lists_of_different_lengths_are_refused(tmp_path):
    source = as_list_in_order(tmp_path / "set")
    write_image(source / "one-more.png")
    with pytest.raises(UsageError, match=r"captions.txt' has 12 lines, but .* has 13 images"):
        prepared(source)


def test_paths_out_of_the_folder_are_refused_or_reported(tmp_path):
    (outside,) = write_images(tmp_path / "else", 1)
    write_images(tmp_path / "set", 11, 1)
    rows = [{"image": f"{n}.png", "caption": f"number {n}"} for n in range(1, COUNT)]
    for path in ("../else/0.png", "a/../../else/0.png"):
        with pytest.raises(UsageError, match=r"line 12: the image .* is outside of") as refused:
            prepared(write_rows(tmp_path / "set" / "all.jsonl", [*rows, {"image": path, "caption": "x"}]))
        assert "absolute path" in refused.value.fix
    absolute = {"image": str(outside), "caption": "number 0"}
    printed, found, _ = prepared(write_rows(tmp_path / "set" / "all.jsonl", [*rows, absolute]))
    assert {shade: captions for shade, (captions, _) in found.items()} == WANTED
    assert f"1 images are outside of the table's folder, by their absolute paths; the first: {outside}" in printed
    inside = {"image": str(tmp_path / "set" / "1.png"), "caption": "number 1"}
    assert not any(
        "outside" in line for line in prepared(write_rows(tmp_path / "set" / "all.jsonl", [*rows, inside]))[0]
    )


def test_relative_folder_is_the_same_folder(tmp_path, monkeypatch):
    root = tmp_path / "set"
    write_images(root)
    rows = ({"image": str(root / f"{n}.png") if n % 2 else f"{n}.png", "caption": f"number {n}"} for n in range(COUNT))
    write_rows(root / "captions.jsonl", rows)
    monkeypatch.chdir(root)
    _, found, manifest = prepared(".")
    assert {shade: captions for shade, (captions, _) in found.items()} == WANTED and manifest["left_out"] == {}
    assert prepared(root)[0] == []


def test_name_with_two_leading_dots_is_inside(tmp_path):
    write_images(tmp_path)
    (tmp_path / "0.png").rename(tmp_path / "..0.png")
    rows = [{"image": "..0.png", "caption": "number 0"}]
    rows += [{"image": f"{n}.png", "caption": f"number {n}"} for n in range(1, COUNT)]
    assert captions_of(write_rows(tmp_path / "all.jsonl", rows)) == WANTED


def test_links_to_files_broken_links_and_cycles(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for n, path in enumerate(write_images(tmp_path / "else")):
        (root / path.name).symlink_to(path)
        (root / f"{n}.txt").write_text(f"number {n}")
    (root / "nowhere.png").symlink_to(tmp_path / "gone.png")
    (root / "nowhere.txt").write_text("x")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "loop.txt").write_text("x")
    (root / "circle").symlink_to(root, target_is_directory=True)
    _, found, manifest = prepared(root)
    assert {shade: captions for shade, (captions, _) in found.items()} == WANTED
    assert manifest["left_out"] == {"captions without an image": 2}


def test_changed_images_are_decoded_again(tmp_path):
    source = as_folder_of_both(tmp_path / "set")
    assert prepared(source)[0] and not prepared(source)[0]
    (source / "deeper" / "3.txt").write_text("another text")
    assert captions_of(source)[3] == ["another text"]
    table = as_jsonl(tmp_path / "rows")
    assert prepared(table)[0] and not prepared(table)[0]
    os.utime(table.parent / "pixels" / "0.png", (1, 1))
    assert prepared(table)[0]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"picture": "0.png", "caption": "x"}], "no column image; there are: caption, picture"),
        ([{"image": "0.png", "words": "x"}], "no column caption; there are: image, words"),
        ([{"image": 3, "caption": "x"}], "'image' holds int, not a path or bytes"),
        ([{"image": "0.png", "caption": 3}], "a caption is int, not text"),
        ([{"image": "0.png", "caption": ["x", None]}], "a caption is NoneType, not text"),
        (["no row"], "a JSON str, not an object"),
    ],
)
def test_invalid_rows_are_refused_with_their_position(tmp_path, rows, what):
    write_images(tmp_path, 1)
    with pytest.raises(UsageError, match="line 1") as refused:
        prepared(write_rows(tmp_path / "all.jsonl", rows))
    assert what in refused.value.what and refused.value.fix


def test_unreadable_tables_are_refused_with_a_fix(tmp_path):
    write_images(tmp_path)
    (tmp_path / "wide.tsv").write_text("0.png\tx\n1.png\ta\tb\n")
    with pytest.raises(UsageError, match=r"line 2: 3 columns instead of 2"):
        prepared(tmp_path / "wide.tsv")
    (tmp_path / "latin.tsv").write_bytes("0.png\tStraße\n".encode("latin1"))
    with pytest.raises(UsageError, match=r"line 1: byte 0xdf is not UTF-8") as refused:
        prepared(tmp_path / "latin.tsv")
    assert "iconv" in refused.value.fix
    (tmp_path / "half.jsonl").write_text('{"image": "0.png", "caption": "\\ud800"}\n')
    with pytest.raises(UsageError, match="half of a surrogate pair"):
        prepared(tmp_path / "half.jsonl")
    parquet.write_table(arrow.table({"image": ["0.png"], "words": ["x"]}), tmp_path / "wrong.parquet")
    with pytest.raises(UsageError, match=r"no column caption; there are: image, words"):
        prepared(tmp_path / "wrong.parquet")
    with pytest.raises(UsageError, match=r"no column 'alt'; there are: image, words"):
        prepared(tmp_path / "wrong.parquet", column="alt")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "wrong.parquet").read_bytes()[:-9])
    with pytest.raises(UsageError, match="not a readable Parquet file"):
        prepared(tmp_path / "cut.parquet")
    (tmp_path / "all.xml").write_text("0.png,x")
    with pytest.raises(UsageError, match=r"cannot read captions from .xml files"):
        prepared(tmp_path / "all.xml")
    with pytest.raises(UsageError, match="no such file or folder"):
        prepared(tmp_path / "nowhere")
    write_images(tmp_path / "bare", 1)
    with pytest.raises(UsageError, match="images, but no captions") as refused:
        prepared(tmp_path / "bare")
    assert "captions.jsonl" in refused.value.fix


def test_text_and_pairs_of_texts_are_not_images(tmp_path):
    (tmp_path / "text.tsv").write_text("a source\ta target\n")
    write_rows(tmp_path / "text.jsonl", [{"source": "a", "target": "b"}])
    write_rows(tmp_path / "plain.jsonl", [{"text": "a"}])
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("text")
    write_rows(tmp_path / "code.jsonl", [{"path": "a.py", "text": "a"}])
    parquet.write_table(arrow.table({"path": ["a.py"], "text": ["a"]}), tmp_path / "code.parquet")
    for name in ("text.tsv", "text.jsonl", "plain.jsonl", "code", "code.jsonl", "code.parquet", "nowhere"):
        assert not holds_captioned(str(tmp_path / name)), name


SCRIPTS = ("ein Schwan, Öl auf Leinwand", "一只天鹅", "بجعة على الماء", "Лебедь", "ཆུ", "👩🏽‍🚀 im All")


def test_captions_in_any_script_are_unchanged(tmp_path):
    write_images(tmp_path, len(SCRIPTS))
    rows = ({"image": f"{n}.png", "caption": text} for n, text in enumerate(SCRIPTS))
    found = captions_of(write_rows(tmp_path / "all.jsonl", rows), held_out=0.5)
    assert found == {n: [text] for n, text in enumerate(SCRIPTS)}


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_clean_caption_is_one_line_and_idempotent(text):
    found = clean_caption(text)
    assert found == clean_caption(found) and not any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 for sign in found)
    assert found == found.strip() and len(found.splitlines()) <= 1
    assert "".join(found.split()) == "".join(
        "".join(" " if ord(s) < 32 or 127 <= ord(s) < 160 else s for s in text).split()
    )
