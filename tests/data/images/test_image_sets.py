"""Named sets of images: arrays from the files of a package, with small files of the same formats."""

import gzip
import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.catalogue import CatalogueEntry, CataloguePackage, entries
from thrifty.data.download import image_extractors
from thrifty.data.download.dataset_download import archives_folder, download_dataset
from thrifty.data.fetched_sets import find_damage
from thrifty.data.images.image_arrays import open_arrays
from thrifty.data.images.image_data import open_images
from thrifty.data.text.document_sources import open_source
from thrifty.data.train_split import DataSplit

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 5, 5), np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 3


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist_members():
    parts = {"train": (IMAGES[:8], LABELS[:8]), "t10k": (IMAGES[8:], LABELS[8:])}
    return {
        f"{part}-{kind}-idx{dims}-ubyte": idx(array)
        for part, arrays in parts.items()
        for kind, dims, array in zip(("images", "labels"), (3, 1), arrays, strict=True)
    }


def debian(members):
    """Return a package as `dpkg` writes it: an archive with a tarball after a member of odd length."""
    tarball = io.BytesIO()
    with tarfile.open(fileobj=tarball, mode="w:xz") as file:
        for name, content in members.items():
            item = tarfile.TarInfo(f"./usr/share/toy/{name}")
            item.size = len(content)
            file.addfile(item, io.BytesIO(content))
    archive = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n!"), ("data.tar.xz", tarball.getvalue())):
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        archive += content + b"\n" * (len(content) % 2)
    return archive


def toy(members, images):
    pins = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    package = CataloguePackage("apt", "toy-images", "1.0-1", "0" * 64, 1000, "usr/share/toy/")
    return CatalogueEntry("toy", "noise", 240, "CC0-1.0", "this test", (package,), pins, images=images)


def test_a_debian_package_becomes_arrays_of_images(cache):
    members = {f"{name}.gz": gzip.compress(content) for name, content in mnist_members().items()}
    archives_folder().mkdir(parents=True)
    (archives_folder() / "toy-images_1.0-1_all.deb").write_bytes(debian(members))
    entry, printed = toy(members, "fashion_mnist"), []
    assert entry.kind == "images" and not entry.present
    folder = download_dataset(entry, printed.append)
    assert printed == [f"toy: images in {folder}; licence: CC0-1.0"] and not find_damage(entry)
    opened = open_arrays(folder)
    train, held_out = (opened[part] for part in DataSplit)
    assert np.array_equal(train.pixels[:, 0], IMAGES[:8]) and np.array_equal(held_out.labels, LABELS[8:])
    scaled = IMAGES[:8] / 255
    assert train.ends.mean == pytest.approx([scaled.mean()]) and train.ends.std == pytest.approx([scaled.std()])
    assert train.ends.labels[9] == "Ankle boot"
    shown = train.fields(np.array([5, 1]))
    assert shown["labels"].tolist() == [2, 1]
    np.testing.assert_allclose(shown["inputs"][0, 0].numpy(), (scaled[5] - scaled.mean()) / scaled.std(), rtol=1e-5)
    (folder / "train.bin").write_bytes(b"")
    assert find_damage(entry) == "train.bin is damaged"
    with pytest.raises(IntegrityError, match="is damaged"):
        open_arrays(folder)


@pytest.mark.parametrize("cut", [0, 7, 60, 100, 150])
def test_truncated_debian_package_is_refused(cache, cut):
    archives_folder().mkdir(parents=True)
    whole = debian(mnist_members())
    (archives_folder() / "toy-images_1.0-1_all.deb").write_bytes(whole[:cut])
    with pytest.raises(IntegrityError, match="not a readable archive"):
        download_dataset(toy(mnist_members(), "mnist"), print)


def test_apt_command_requests_one_version():
    package = entries()["fashion-mnist"].packages[0]
    assert package.command() == ["apt-get", "download", f"dataset-fashion-mnist={package.version}"]


def test_rows_of_png_files_become_cifar_images():
    pixels = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), np.uint8)
    members = {"train_lables.json": json.dumps(list(range(10))).encode(), "test_lables.json": b"[3, 4]"}
    for number in range(6):
        name = f"data_batch_{number + 1}.png" if number < 5 else "test_batch.png"
        file = io.BytesIO()
        Image.fromarray(pixels[2 * number : 2 * number + 2].reshape(2, 1024, 3)).save(file, "PNG")
        members[name] = file.getvalue()
    labels, images = image_extractors.cifar10(members)
    found = list(images)
    assert labels[0] == "airplane" and [label for _, _, label in found] == [*range(10), 3, 4]
    assert [part for part, _, _ in found] == [DataSplit.TRAIN] * 10 + [DataSplit.HELD_OUT] * 2
    for (_, image, _), wanted in zip(found, pixels, strict=True):
        assert np.array_equal(image, wanted.transpose(2, 0, 1))


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x08", b"\x00\x00\x0d\x01\x00\x00\x00\x01a", idx(IMAGES)[:-1]])
def test_content_that_is_no_idx_array_is_refused(content):
    with pytest.raises(IntegrityError, match="IDX format"):
        image_extractors.idx_array(content)


def test_missing_or_textless_set_is_refused_with_a_fix(cache):
    with pytest.raises(UsageError, match="'cifar10' is not on this machine yet") as refused:
        open_images(DataSettings(source="cifar10"), 0, None, print)
    assert refused.value.fix == "thrifty data get cifar10"
    with pytest.raises(UsageError, match="'cifar10' is a set of images, not text") as refused:
        open_source("cifar10")
    assert "objective.name = classification" in refused.value.fix


@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.images])
def test_every_named_set_has_its_function(name):
    assert callable(getattr(image_extractors, entries()[name].images))
