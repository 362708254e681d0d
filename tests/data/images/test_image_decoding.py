"""Decoding of image files of every format, whole and damaged."""

import struct
import sys
import time
import tracemalloc
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import bomb, png, write_image
from PIL import Image

from thrifty.core.errors import UsageError
from thrifty.data.images import image_decoding
from thrifty.data.images.image_decoding import ImageDecodeError, decode


def colour(path, side=4):
    """Return the mean colour of a decoded image."""
    return decode(path, side).mean((1, 2)).round().astype(int).tolist()


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".webp", ".tif", ".ppm"])
def test_every_format_is_decoded_to_one_size(tmp_path, suffix):
    pixels = decode(write_image(tmp_path / f"a{suffix}", 100), 6)
    assert pixels.shape == (3, 6, 6) and pixels.dtype == np.uint8
    assert 85 < pixels.mean() < 115


def test_central_square_is_scaled_to_fit(tmp_path):
    picture = np.zeros((10, 30, 3), np.uint8)
    picture[:, 10:20] = 200
    Image.fromarray(picture).save(tmp_path / "wide.png")
    assert (decode(tmp_path / "wide.png", 10) == 200).all()
    assert (decode(tmp_path / "wide.png", 5)[:, :, 1:-1] == 200).all()


def test_modes_become_rgb_and_transparency_white(tmp_path):
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


def test_image_is_rotated_by_exif(tmp_path):
    picture = np.zeros((8, 8, 3), np.uint8)
    picture[:4] = 255
    image = Image.fromarray(picture)
    noted = image.getexif()
    noted[0x0112] = 6  # rotate clockwise by a quarter turn
    image.save(tmp_path / "turned.png", exif=noted)
    found = decode(tmp_path / "turned.png", 8)
    assert (found[:, :, 4:] == 255).all() and not found[:, :, :4].any()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.png", b"", "it is empty"),
        ("text.png", b"not an image at all", "not an image of a known format"),
        ("bomb.png", bomb(40_000, 40_000), "more than 100,000,000"),
        ("large.png", bomb(12_000, 9_000), "12000 x 9000 pixels are more than"),
        ("cut.png", bomb(100, 100), "damaged"),
        ("vector.png", b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image of a known format"),
    ],
)
def test_damaged_file_has_a_reason_and_large_ones_are_refused(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageDecodeError, match=why):
        decode(tmp_path / name, 8)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".webp", ".tif"])
def test_truncated_file_is_never_half_an_image(tmp_path, suffix):
    whole = write_image(tmp_path / f"whole{suffix}", size=(64, 64)).read_bytes()
    for share in (0.05, 0.3, 0.6, 0.9):
        cut = tmp_path / f"cut{suffix}"
        cut.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ImageDecodeError):
            decode(cut, 8)


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(ImageDecodeError, match="no known range"):
        decode(tmp_path / "f.tif", 8)


def test_error_without_pillow_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match="requires Pillow") as refused:
        image_decoding.pillow()
    assert refused.value.fix == "pip install 'thrifty[images]'"


def giant(path, side):
    """Return a whole PNG file of black one-bit pixels of this height and width."""
    packer = zlib.compressobj(1)
    lines = bytes(1000 * (1 + side // 8))
    path.write_bytes(png(side, side, b"".join(packer.compress(lines) for _ in range(side // 1000)) + packer.flush(), 1))


def test_huge_png_is_refused_without_decoding(tmp_path):
    giant(tmp_path / "small.png", 2000)
    assert decode(tmp_path / "small.png", 4).max() == 0
    giant(tmp_path / "giant.png", 40_000)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(ImageDecodeError, match="more than 100,000,000"):
        decode(tmp_path / "giant.png", 4)
    assert time.process_time() - began < 0.5 and tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("turned", range(1, 9))
def test_each_exif_orientation_is_undone(tmp_path, turned):
    upright = np.zeros((16, 16, 3), np.uint8)
    upright[:8, :8], upright[:8, 8:], upright[8:, :8] = 250, 150, 80
    # positions of the first stored row and column by EXIF 2.3
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: upright.transpose(1, 0, 2)[::-1, ::-1], 8: np.rot90(upright, 3),
    }[turned]  # fmt: skip
    image = Image.fromarray(np.ascontiguousarray(stored))
    noted = image.getexif()
    noted[0x0112] = turned
    image.save(tmp_path / "a.jpg", exif=noted, quality=95)
    found = decode(tmp_path / "a.jpg", 16)[0].astype(int)
    assert [abs(found[y, x] - wanted) < 12 for y, x, wanted in ((4, 4, 250), (4, 12, 150), (12, 4, 80))] == [True] * 3


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_first_of_several_images_in_a_file(tmp_path, suffix):
    first, *others = (Image.new("RGB", (8, 8), (shade,) * 3) for shade in (200, 100, 0))
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=others, duration=50, lossless=True)
    with Image.open(tmp_path / f"a.{suffix}") as opened:
        assert getattr(opened, "n_frames", 1) == 3
    assert all(abs(value - 200) < 3 for value in colour(tmp_path / f"a.{suffix}"))


def test_palettes_alpha_and_sixteen_bit_colours(tmp_path):
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 0, 0] + [0] * 762)
    palette.save(tmp_path / "half.png", transparency=bytes([255, 51]))  # the red a fifth opaque
    assert colour(tmp_path / "half.png") == [244, 204, 204]
    palette.save(tmp_path / "clear.gif", transparency=1)
    assert colour(tmp_path / "clear.gif") == [255] * 3
    Image.new("LA", (8, 8), (55, 51)).save(tmp_path / "grey.png")
    assert colour(tmp_path / "grey.png") == [215] * 3
    Image.new("LA", (8, 8), (55, 51)).save(tmp_path / "grey.webp", lossless=True)
    assert colour(tmp_path / "grey.webp") == [215] * 3
    line = b"\0" + struct.pack(">HHH", 25_700, 51_400, 65_535) * 8
    (tmp_path / "deep.png").write_bytes(png(8, 8, zlib.compress(line * 8), depth=16, colour=2))
    assert colour(tmp_path / "deep.png") == [100, 200, 255]


def test_bytes_decode_like_their_file(tmp_path):
    path = write_image(tmp_path / "a.jpg", 100)
    assert np.array_equal(decode(path, 6), decode(path.read_bytes(), 6))
    with pytest.raises(ImageDecodeError, match="it is empty"):
        decode(b"", 6)
    with pytest.raises(ImageDecodeError, match="not an image of a known format"):
        decode(b"GIF8 it is not", 6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_file_decodes_fully_or_is_refused(data):
    content = bytearray(data.draw(st.sampled_from(WHOLE)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
        content[place] = data.draw(st.integers(0, 255))
    try:
        assert decode(bytes(content), 8).shape == (3, 8, 8)
    except ImageDecodeError as error:
        assert str(error)


def encoded(kind):
    file = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


WHOLE = [encoded(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
