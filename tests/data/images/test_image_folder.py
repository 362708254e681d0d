"""Folders of images: used, held-out and left-out files, and repeated decoding."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from image_files import bomb, write_folder, write_image

from thrifty.core.errors import UsageError
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.data.images.image_arrays import open_arrays
from thrifty.data.images.image_data import holds_images, holds_mainly_images, open_images
from thrifty.data.images.image_folder import image_files, prepare_folder
from thrifty.data.images.image_listing import split_folders
from thrifty.data.train_split import DataSplit


def said_of(folder, **changed):
    """Return the printed messages and the arrays."""
    printed: list[str] = []
    wanted = {"side": 8, "held_out": 0.3} | changed
    prepared = prepare_folder(folder, wanted["side"], wanted["held_out"], printed.append, wanted.get("labelled", True))
    return printed, open_arrays(prepared), prepared


def test_label_is_the_folder_at_any_depth(tmp_path):
    folder = write_folder(tmp_path / "set")
    shutil.move(folder / "dark" / "00.png", folder / "dark" / "deeper.png")
    write_image(folder / "light" / "inner" / "x.JPG", 210, seed=99)
    write_image(folder / ".hidden" / "x.png")
    (folder / "light" / "notes.txt").write_text("no image")
    printed, opened, _ = said_of(folder)
    assert len(printed) == 1 and "preparing the images of" in printed[0]
    train, held_out = (opened[part] for part in DataSplit)
    assert len(train) + len(held_out) == 25 and min(len(train), len(held_out)) > 0
    assert train.ends.labels == ("dark", "light") and train.pixels.shape[1:] == (3, 8, 8)
    for arrays in (train, held_out):
        bright = arrays.pixels.mean((1, 2, 3)) > 128
        assert np.array_equal(bright, arrays.labels == 1)


def test_split_depends_on_contents_not_on_names(tmp_path):
    folder = write_folder(tmp_path / "set", 20)
    for path in (folder / "dark").iterdir():
        shutil.copy(path, path.with_name(f"copy-of-{path.name}"))
    _, opened, _ = said_of(folder)
    dark = {part: [image.tobytes() for image in a.pixels[a.labels == 0]] for part, a in opened.items()}
    assert not set(dark[DataSplit.TRAIN]) & set(dark[DataSplit.HELD_OUT])
    assert all(own.count(image) == 2 for own in dark.values() for image in own)


def test_parts_of_a_folder_are_used(tmp_path):
    write_folder(tmp_path / "set" / "train", 6)
    write_folder(tmp_path / "set" / "test", 3)
    write_image(tmp_path / "set" / "train" / ".hidden" / "x.png")
    _, opened, _ = said_of(tmp_path / "set", held_out=0.9)
    assert {part: len(arrays) for part, arrays in opened.items()} == {DataSplit.TRAIN: 12, DataSplit.HELD_OUT: 6}
    assert opened[DataSplit.TRAIN].ends.labels == ("dark", "light")


@pytest.mark.parametrize(("train", "held_out"), [("Train", "Test"), ("Training", "Testing"), ("train", "dev")])
def test_other_spellings_of_parts_are_parts(tmp_path, train, held_out):
    write_folder(tmp_path / "set" / train, 6)
    write_folder(tmp_path / "set" / held_out, 3)
    _, opened, _ = said_of(tmp_path / "set", held_out=0.9)
    assert {part: len(arrays) for part, arrays in opened.items()} == {DataSplit.TRAIN: 12, DataSplit.HELD_OUT: 6}
    assert opened[DataSplit.TRAIN].ends.labels == ("dark", "light")


def test_held_out_images_are_those_of_val_or_else_of_test(tmp_path):
    for names, used in ((("train", "eval", "dev", "test"), "test"), (("val",), "val")):
        for name in names:
            (tmp_path / name).mkdir()
        assert split_folders(tmp_path)[1] == (DataSplit.HELD_OUT, tmp_path / used)


def test_a_label_may_have_the_name_of_one_part(tmp_path):
    vehicles = write_folder(tmp_path / "vehicles", 2, labels=("car", "train/steam"))
    assert {file.label for file in image_files(vehicles)} == {"car", "train"}
    write_image(vehicles / "test" / "x.png")
    with pytest.raises(UsageError, match="test and train would be among the labels, but these are names of parts"):
        image_files(vehicles)


def test_parts_without_folders_of_labels_are_refused(tmp_path):
    flat = write_folder(tmp_path / "flat", 2, labels=("testing", "training"))
    with pytest.raises(UsageError, match="testing and training would be among the labels") as refused:
        image_files(flat)
    assert "into folders such as testing/cat and put the images of training into" in refused.value.fix
    assert len(image_files(flat, labelled=False)) == 4
    write_folder(flat / "training", 2)
    with pytest.raises(UsageError, match="testing and training would be among the labels") as refused:
        image_files(flat)
    assert refused.value.fix.startswith(f"set data.source to {flat / 'training'}; or put the images of testing into")


def test_damaged_files_are_left_out_counted_and_named(tmp_path):
    folder = write_folder(tmp_path / "set")
    (folder / "dark" / "empty.png").write_bytes(b"")
    (folder / "dark" / "bomb.png").write_bytes(bomb(40_000, 40_000))
    for number in range(6):
        (folder / "light" / f"text{number}.jpg").write_text("no image")
    printed, opened, _ = said_of(folder)
    message = printed[-1]
    assert "8 of 32 image files are left out" in message and "and 3 more" in message
    assert "dark/bomb.png: it has more than" in message and "dark/empty.png: it is empty" in message
    assert sum(map(len, opened.values())) == 24
    data = open_images(DataSettings(source=str(folder), batch=4, size=8, held_out=0.3), 0, None, printed.append)
    assert data.left_out == len(data.named) == 8 and data.description()["left_out"] == 8
    assert message in printed and len(printed) == 2  # decoded and reported once


def test_images_are_decoded_again_only_after_a_change(tmp_path):
    folder = write_folder(tmp_path / "set")
    _, _, first = said_of(folder)
    assert said_of(folder)[0] == []
    changed = folder / "dark" / "00.png"
    os.utime(changed, (1, 1))
    assert said_of(folder)[2] != first
    assert said_of(folder, side=4)[2] != first
    assert said_of(folder, held_out=0.5)[2] != first


def test_damaged_cache_is_rebuilt(tmp_path):
    folder = write_folder(tmp_path / "set")
    _, before, prepared = said_of(folder)
    pixels = np.array(before[DataSplit.TRAIN].pixels)
    (prepared / "train.bin").write_bytes(b"damaged")
    printed, after, _ = said_of(folder)
    assert "again, since train.bin has another size" in printed[0]
    assert np.array_equal(after[DataSplit.TRAIN].pixels, pixels)


def test_unusable_folders_are_refused_with_a_fix(tmp_path):
    one = write_folder(tmp_path / "one", labels=("cat",))
    with pytest.raises(UsageError, match="all images have the label 'cat'"):
        image_files(one)
    write_folder(tmp_path / "half" / "train", 1)
    with pytest.raises(UsageError, match="train would be among the labels") as refused:
        image_files(tmp_path / "half")
    assert str(tmp_path / "half" / "train") in refused.value.fix
    write_image(tmp_path / "flat" / "a.png")
    with pytest.raises(UsageError, match="images are in the folder itself") as refused:
        image_files(tmp_path / "flat")
    assert "flat/cat and flat/dog" in refused.value.fix
    blind = write_folder(tmp_path / "blind", 4)
    for path in (blind / "dark").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="no image of the label 'dark'"):
        said_of(blind)
    few = write_folder(tmp_path / "few", 1)
    with pytest.raises(UsageError, match="no image is left"):
        said_of(few, held_out=0.01)
    with pytest.raises(UsageError, match="images to train on, fewer than one batch of 99"):
        large = DataSettings(source=str(write_folder(tmp_path / "set")), batch=99, size=8, held_out=0.3)
        open_images(large, 0, None, lambda text: None)
    with pytest.raises(UsageError, match="the image size") as refused:
        open_images(DataSettings(source=str(tmp_path / "set")), 0, None, print)
    assert "data.size=64" in refused.value.fix


def test_relative_folder_is_decoded_once(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "set")
    assert said_of(folder)[0]
    monkeypatch.chdir(tmp_path)
    assert said_of(Path("set"))[0] == []


def test_image_folders_are_distinguished_from_text(tmp_path):
    folder = write_folder(tmp_path / "set", 1)
    assert holds_images(str(folder)) and holds_mainly_images(str(folder))
    (folder / "LICENSE").write_text("some text")
    assert holds_mainly_images(str(folder))
    for number in range(2):
        (folder / f"{number}.txt").write_text("some text")
    assert holds_images(str(folder)) and not holds_mainly_images(str(folder))
    (tmp_path / "text").mkdir()
    assert not holds_images(str(tmp_path / "text")) and not holds_images(str(tmp_path / "nowhere"))
    assert holds_images("digits") and holds_images("cifar10") and not holds_images("kjv")


@settings(max_examples=25)
@given(st.text(min_size=1, max_size=12).filter(lambda name: name.isprintable() and "/" not in name))
def test_a_label_may_have_any_name(tmp_path_factory, name):
    assume(not name.startswith("."))
    folder = tmp_path_factory.mktemp("named")
    write_image(folder / name / "a.png")
    write_image(folder / (name + "2") / "b.png")
    assert {file.label for file in image_files(folder)} == {name, name + "2"}


def test_unlabelled_images_anywhere_have_the_same_split(tmp_path):
    folder = write_folder(tmp_path / "set")
    data_settings = DataSettings(source=str(folder), batch=4, size=8, held_out=0.3)
    printed: list[str] = []
    labelled = open_images(data_settings, 0, None, printed.append)
    bare = open_images(data_settings, 0, None, printed.append, labelled=False)
    assert len(printed) == 1  # decoded once for both
    assert bare.ends.labels == () and "label_entropy" not in bare.facts and bare.description()["labels"] == []
    (one,), (other,) = (list(data.held_out.batches(99, 99)) for data in (labelled, bare))
    assert other.fields.keys() == {"inputs", "key"} and torch.equal(one["inputs"], other["inputs"])
    write_image(folder / "flat.png", 99)
    assert sum(map(len, open_images(data_settings, 0, None, printed.append).parts.values())) == 24
    assert sum(map(len, open_images(data_settings, 0, None, printed.append, labelled=False).parts.values())) == 25
    write_folder(tmp_path / "flat", 20, labels=(".",))
    write_image(tmp_path / "flat" / "deep" / "er" / "x.png", 99)
    flat = open_images(
        DataSettings(source=str(tmp_path / "flat"), batch=4, size=8, held_out=0.3),
        0,
        None,
        printed.append,
        labelled=False,
    )
    assert sum(map(len, flat.parts.values())) == 21
    with pytest.raises(UsageError, match="there are no images"):
        (tmp_path / "void").mkdir()
        image_files(tmp_path / "void", labelled=False)


def test_unlabelled_images_accept_one_class_and_parts(tmp_path):
    one = write_folder(tmp_path / "one", labels=("cat",))
    with pytest.raises(UsageError, match="all images have the label 'cat'") as refused:
        image_files(one)
    assert "masked_reconstruction" in refused.value.fix
    assert len(image_files(one, labelled=False)) == 12
    for part, count in (("train", 5), ("val", 3)):
        for number in range(count):
            write_image(tmp_path / "parts" / part / f"{number}.png", seed=number)
    _, opened, _ = said_of(tmp_path / "parts", labelled=False)
    assert {part: len(arrays) for part, arrays in opened.items()} == {DataSplit.TRAIN: 5, DataSplit.HELD_OUT: 3}


def test_unreadable_label_does_not_matter_without_labels(tmp_path):
    blind = write_folder(tmp_path / "blind")
    for path in (blind / "dark").iterdir():
        path.write_bytes(b"")
    printed, opened, _ = said_of(blind, labelled=False)
    assert sum(map(len, opened.values())) == 12 and "12 of 24 image files are left out" in printed[-1]
    with pytest.raises(UsageError, match="no image of the label 'dark'"):
        said_of(blind)


def test_links_are_followed_once_and_broken_ones_left_out(tmp_path):
    folder = write_folder(tmp_path / "set", 6)
    other = write_folder(tmp_path / "other", 3)
    (folder / "dark" / "more").symlink_to(other / "dark", target_is_directory=True)
    (folder / "dark" / "circle").symlink_to(folder / "dark", target_is_directory=True)
    (folder / "light" / "link.png").symlink_to(other / "light" / "00.png")
    (folder / "light" / "nowhere.png").symlink_to(tmp_path / "gone.png")
    (folder / "light" / "loop.png").symlink_to(folder / "light" / "loop.png")
    os.mkfifo(folder / "light" / "pipe.png")
    printed, opened, _ = said_of(folder, held_out=0.5)
    assert sum(map(len, opened.values())) == 6 + 3 + 6 + 1
    assert "3 of 19 image files are left out" in printed[-1] and "light/nowhere.png: it is not a file" in printed[-1]


def test_names_that_are_not_utf8_are_accepted(tmp_path):
    strange = os.fsdecode(b"caf\xe9")
    folder = write_folder(tmp_path / "set", labels=("dark", strange))
    (folder / "dark" / f"{strange}.png").write_bytes(b"")
    printed, opened, _ = said_of(folder)
    assert opened[DataSplit.TRAIN].ends.labels == ("caf\ufffd", "dark")
    assert "dark/caf\ufffd.png: it is empty" in printed[-1]
    "".join([*printed, *opened[DataSplit.TRAIN].ends.labels]).encode()


def test_mixing_requires_labels(tmp_path):
    folder = write_folder(tmp_path / "set")
    data_settings = DataSettings(
        source=str(folder), batch=4, size=8, held_out=0.3, augment=AugmentationSettings(mixup=0.2)
    )
    with pytest.raises(UsageError, match=r"data.augment.mixup mixes labels"):
        open_images(data_settings, 0, None, print, labelled=False)
