"""Image files of every kind, whole and broken."""

import sys

import numpy as np
import pytest
from PIL import Image

from data.image_files import bomb, write_image
from thrifty.core.errors import UsageError
from thrifty.data import decoding
from thrifty.data.decoding import Undecodable, decode


def colour(path, side=4):
    """The mean colour of what is decoded."""
    return decode(path, side).mean((1, 2)).round().astype(int).tolist()


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".webp", ".tif", ".ppm"])
def test_every_format_is_decoded_to_one_size(tmp_path, suffix):
    pixels = decode(write_image(tmp_path / f"a{suffix}", 100), 6)
    assert pixels.shape == (3, 6, 6) and pixels.dtype == np.uint8
    assert 85 < pixels.mean() < 115


def test_it_is_the_middle_that_is_taken_and_scaled_to_fit(tmp_path):
    picture = np.zeros((10, 30, 3), np.uint8)
    picture[:, 10:20] = 200
    Image.fromarray(picture).save(tmp_path / "wide.png")
    assert (decode(tmp_path / "wide.png", 10) == 200).all()
    assert (decode(tmp_path / "wide.png", 5)[:, :, 1:-1] == 200).all()


def test_modes_become_rgb_and_what_is_clear_becomes_white(tmp_path):
    for mode, value, wanted in (
        ("L", 90, [90] * 3),
        ("LA", (90, 0), [255] * 3),
        ("RGBA", (255, 0, 0, 51), [255, 204, 204]),
        ("1", 1, [255] * 3),
        ("P", 0, [0] * 3),
    ):
        Image.new(mode, (8, 8), value).save(tmp_path / f"{mode}.png")
        assert colour(tmp_path / f"{mode}.png") == wanted, mode
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([10, 20, 30] + [0] * 765)
    palette.save(tmp_path / "clear.png", transparency=0)
    assert colour(tmp_path / "clear.png") == [255] * 3
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    red, green, blue = colour(tmp_path / "cmyk.jpg")
    assert red > 200 and max(green, blue) < 60


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    Image.fromarray(np.full((8, 8), 25_700, np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(np.full((8, 8), 25_700, np.uint16)).save(tmp_path / "deep.tif")
    assert colour(tmp_path / "deep.png") == colour(tmp_path / "deep.tif") == [100] * 3


def test_an_image_is_turned_as_the_camera_noted(tmp_path):
    picture = np.zeros((8, 8, 3), np.uint8)
    picture[:4] = 255
    image = Image.fromarray(picture)
    noted = image.getexif()
    noted[0x0112] = 6  # to be turned clockwise by a quarter
    image.save(tmp_path / "turned.png", exif=noted)
    found = decode(tmp_path / "turned.png", 8)
    assert (found[:, :, 4:] == 255).all() and not found[:, :, :4].any()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.png", b"", "it is empty"),
        ("text.png", b"not an image at all", "no image of a known format"),
        ("bomb.png", bomb(40_000, 40_000), "more than 100,000,000"),
        ("large.png", bomb(12_000, 9_000), "12000 x 9000 pixels are more than"),
        ("cut.png", bomb(100, 100), "damaged"),
        ("vector.png", b"%!PS-Adobe-3.0 EPSF-3.0\n", "no image of a known format"),
    ],
)
def test_a_broken_file_says_why_and_nothing_large_is_decoded(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Undecodable, match=why):
        decode(tmp_path / name, 8)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".webp", ".tif"])
def test_a_file_cut_off_anywhere_is_never_half_an_image(tmp_path, suffix):
    whole = write_image(tmp_path / f"whole{suffix}", size=(64, 64)).read_bytes()
    for share in (0.05, 0.3, 0.6, 0.9):
        cut = tmp_path / f"cut{suffix}"
        cut.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(Undecodable):
            decode(cut, 8)


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(Undecodable, match="no known range"):
        decode(tmp_path / "f.tif", 8)


def test_without_pillow_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match="needs Pillow") as refused:
        decoding.pillow()
    assert refused.value.fix == "pip install 'thrifty[images]'"
