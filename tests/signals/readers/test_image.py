import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from hsa.errors import InvalidInput
from hsa.signals import Grid
from hsa.signals.readers import read_image
from hsa.signals.readers.image import FORMATS


def noise(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def whole(signal):
    """Return the pixels of a grid of patches."""
    rows, columns = signal.domain.shape
    patches = signal.values.unflatten(0, (rows, columns)).transpose(1, 2)
    return patches.flatten(2, 3).flatten(0, 1).numpy()


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_patches_are_the_picture_row_by_row(tmp_path):
    pixels = noise(48, 80)
    signal = read_image(pixels)
    assert signal.domain == Grid((3, 5))
    assert signal.modalities == ("patch",)
    assert signal.values.dtype == torch.uint8
    assert np.array_equal(whole(signal), pixels)
    assert np.array_equal(signal.members[6].value, pixels[16:32, 16:32])
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    for form in (path, str(path), path.read_bytes(), Image.fromarray(pixels), torch.from_numpy(pixels)):
        assert read_image(form) == signal


def test_blocks():
    flat = read_image(noise(7 * 8, 10 * 8), patch=8)
    blocked = read_image(noise(7 * 8, 10 * 8), patch=8, block=4)
    assert blocked.domain == Grid((2, 3))
    assert [block.domain.shape for block in blocked.members] == [(4, 4), (4, 4), (4, 2), (3, 4), (3, 4), (3, 2)]
    assert blocked.members[5].members[3].value.equal(flat.members[5 * 10 + 9].value)
    assert blocked.num_leaves == flat.num_leaves


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 20), st.integers(20, 300))
def test_sizes(height, width, patch, largest):
    rows, columns = read_image(np.zeros((height, width), np.uint8), patch=patch, largest=largest).domain.shape
    assert patch <= max(rows, columns) * patch <= largest
    scale = min(1, largest / max(height, width))
    for patches, side in ((rows, height), (columns, width)):
        assert patches == 1 or abs(patches * patch - side * scale) < patch


def test_exif_orientation():
    picture = Image.fromarray(noise(32, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = read_image(encoded(picture, exif=exif))
    assert turned.domain == Grid((4, 2))
    assert turned == read_image(np.rot90(np.asarray(picture), -1).copy())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_modes(mode):
    grey = Image.fromarray(np.full((16, 16), 128, np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.full((16, 16), 128 * 257, np.uint16))
    else:
        picture = grey.quantize() if mode == "P" else grey.convert(mode)
    signal = read_image(encoded(picture, "TIFF" if mode == "CMYK" else "PNG"))
    assert signal.values.shape == (1, 16, 16, 3)
    if mode != "1":
        assert (signal.values.int() - 128).abs().max() <= 1


def test_transparent_pixels_are_white():
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    palette = Image.new("P", (16, 16))
    for data in (encoded(clear), encoded(palette, transparency=0), encoded(clear, "WEBP", lossless=True)):
        assert read_image(data).values.min() == 255


def test_one_pixel_and_one_frame():
    assert read_image(noise(1, 1)).domain == Grid((1, 1))
    assert read_image(noise(1, 1000)).domain == Grid((1, 14))
    frames = [Image.new("L", (16, 16), value) for value in (0, 255)]
    assert read_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])).values.max() == 0


def test_large_photos_keep_their_content():
    ramp = np.broadcast_to(np.linspace(0, 255, 2000).astype(np.uint8)[None, :, None], (1501, 2000, 3))
    signal = read_image(encoded(Image.fromarray(np.ascontiguousarray(ramp)), "JPEG"))
    assert signal.domain == Grid((11, 14))
    assert np.abs(whole(signal)[80, :, 0].astype(int) - np.linspace(0, 255, 224)).max() < 6


PNG = encoded(Image.fromarray(noise(64, 64)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        PNG[:40],
        PNG[:5000],
        PNG[:60] + b"\0" * 9 + PNG[69:],
        encoded(Image.new("L", (9, 9)), "GIF")[:30],
    ],
)
def test_damaged_files_are_named(tmp_path, data):
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"a.png: no readable image \(.*\); expected an image in one of"):
        read_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 20_000])
def test_pictures_with_too_many_pixels(tmp_path, side):
    path = tmp_path / "a.png"
    Image.new("1", (side, side)).save(path)
    with pytest.raises(
        InvalidInput, match=r"a.png: (expected at most .*, got 10,000 × 10,000 pixels|no readable .* bomb)"
    ):
        read_image(path)


def png_header(width, height):
    """Return a PNG of this size without its pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + b"\0\0\0\x09IDAT"
    )


def test_the_limit_on_pixels_is_ours_and_checked_before_decoding(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as other packages set it
    bombs = {
        "PNG": png_header(60_000, 60_000),
        "GIF": b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\0\0\0,\0\0\0\0\1\0\1\0\0\x02\x02\x44\1\0;",
        "BMP": b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
    }
    for data in bombs.values():
        with pytest.raises(InvalidInput, match=r"expected at most 89,478,485, got 60,000 × 60,000 pixels"):
            read_image(data)
    frames = [Image.new("L", (16, 16), value) for value in (0, 255)]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    at = animated.rindex(b"\x2c\0\0\0\0\x10\0\x10\0")  # the second frame, which is not decoded
    animated = animated[: at + 5] + struct.pack("<HH", 60_000, 60_000) + animated[at + 9 :]
    assert read_image(animated).values.max() == 0
    lazy = Image.open(io.BytesIO(bombs["PNG"]))
    with pytest.raises(InvalidInput, match="60,000 × 60,000"):
        read_image(lazy)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["a.png", "a.eps"])
def test_postscript_starts_no_program(tmp_path, monkeypatch, name):
    def run(*arguments, **options):
        raise AssertionError(f"starts {arguments}")

    for function in ("Popen", "run", "check_call", "call"):
        monkeypatch.setattr(f"subprocess.{function}", run)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    monkeypatch.setattr(EpsImagePlugin, "has_ghostscript", lambda: True)
    (tmp_path / name).write_bytes(POSTSCRIPT)
    with pytest.raises(InvalidInput, match=r"no readable image .*; expected an image in one of the formats PNG"):
        read_image(tmp_path / name)


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "SGI", "ICNS", "PDF"])
def test_other_formats_are_refused(kind):
    with pytest.raises(InvalidInput, match="no readable image"):
        read_image(encoded(Image.new("RGB", (32, 32)), kind))


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind):
    assert read_image(encoded(Image.new("RGB", (32, 48)), kind)).domain == Grid((3, 2))


def test_errors(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"none.png: no such file; expected an image in one of the formats PNG, JPEG"
    ):
        read_image(tmp_path / "none.png")
    with pytest.raises(InvalidInput, match=r"page\[2\]: no readable image"):
        read_image(b"x", where="page[2]")
    with pytest.raises(InvalidInput, match=r"image: no readable image \(a dict\)"):
        read_image({})
    with pytest.raises(InvalidInput, match="no readable image"):
        read_image(np.zeros((3, 5, 7, 2)))
    for arguments, message in (
        ({"patch": 0}, "patch: expected 1 or more, got 0"),
        ({"largest": 15}, "largest: expected 16 or more, got 15"),
        ({"block": 0}, "block: expected 1 or more, got 0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            read_image(noise(5, 5), **arguments)
