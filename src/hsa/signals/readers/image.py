"""Read an image as a grid of patches, or as a grid of blocks of patches."""

from __future__ import annotations

from io import BytesIO
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals.domains import Grid
from hsa.signals.readers.text import load_bytes
from hsa.signals.signal import Signal

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
"""Formats that are read. Pillow knows others, and starts programs for some of them: Ghostscript for PostScript."""
MAX_PIXELS = 89_478_485
"""Maximum number of pixels of an image (Pillow's own limit): as RGB they take a quarter of a gigabyte."""

_EXPECTED = f"an image in one of the formats {', '.join(FORMATS)}"


def read_image(
    picture: Any, *, patch: int = 16, largest: int = 224, block: int | None = None, where: str | None = None
) -> Signal:
    """Read an image as a `Grid` of square patches: leaves of modality "patch", uint8 `[patch, patch, 3]` in RGB.

    Args:
        picture: Path of a file, its bytes (PNG, JPEG, GIF, BMP, TIFF or WebP, whatever the suffix says), a Pillow image,
            or uint8 pixels `[height, width]` or `[height, width, channels]`. Only the first frame of an animation is
            read. The image is rotated according to its EXIF data; transparent pixels are placed on white.
        patch: Side of a patch in pixels.
        largest: Largest length of the longer side in pixels. Larger images are scaled down; both sides are rounded to
            whole patches.
        block: Side of a block in patches; the result is then a `Grid` of blocks, each a `Grid` of patches.
        where: Name of the image in error messages; its path by default.

    Raises:
        InvalidInput: For a missing or damaged file, another format, an object that is not an image, or more than
            `MAX_PIXELS` pixels.
        MissingExtra: If `pillow` is not installed.

    >>> read_image(np.zeros((480, 640), np.uint8))
    Signal(Grid((10, 14)), 140 leaves, 1 family, depth 1, patch)
    >>> read_image(np.zeros((480, 640), np.uint8), block=4).domain
    Grid((3, 4))
    """
    for name, value, least in (("patch", patch, 1), ("largest", largest, patch), ("block", block, 1)):
        if value is not None and value < least:
            raise InvalidInput(name, got=value, expected=f"{least} or more")
    where = where or (str(picture) if isinstance(picture, (str, PathLike)) else "image")
    pixels = torch.from_numpy(_pixels(picture, patch, largest, where))
    patches = pixels.unflatten(0, (-1, patch)).unflatten(2, (-1, patch)).transpose(1, 2).contiguous()
    if block is None:
        return _grid(patches)
    rows = [band.split(block, dim=1) for band in patches.split(block)]
    return Signal(Grid((len(rows), len(rows[0]))), [_grid(part.contiguous()) for row in rows for part in row])


def _grid(patches: Tensor) -> Signal:
    return Signal.of(patches, "patch", Grid(patches.shape[:2]))


def _pixels(picture: Any, patch: int, largest: int, where: str) -> NDArray[np.uint8]:
    """Return the scaled pixels `[height, width, 3]`."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingExtra("pillow", "readers", "reading images") from None

    if isinstance(picture, (str, PathLike)):
        picture = load_bytes(picture, expected=_EXPECTED, where=where)
    try:
        image = _open(picture)
        _check_pixels(*image.size, where)  # known from the header: nothing is decoded yet
        if image is picture:
            image = image.copy()  # the caller's image is not changed
        # Decoding takes most of the time of large photos; JPEG can be decoded at 1/8, 1/4 or 1/2 of its size.
        full = image.size
        image.draft("RGB", (largest, largest))
        is_turned = image.getexif().get(0x0112, 1) >= 5  # the orientations that swap the sides
        size = _whole_patches(full[::-1] if is_turned else full, patch, largest)
        image = _on_white(ImageOps.exif_transpose(image))
        return np.array(image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0), np.uint8)
    except InvalidInput:
        raise
    except Exception as error:  # decoders raise a dozen types for damaged files
        raise InvalidInput(where, problem=f"no readable image ({error})", expected=_EXPECTED) from None


def _open(picture: Any) -> Image:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    if isinstance(picture, (bytes, bytearray)):
        return Image.open(BytesIO(picture), formats=FORMATS)
    if isinstance(picture, (np.ndarray, Tensor)):
        array = np.asarray(picture)
        return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    raise TypeError(f"a {type(picture).__name__}")


def _check_pixels(width: int, height: int, where: str) -> None:
    if width * height > MAX_PIXELS:
        raise InvalidInput(
            where,
            got=f"{width:,} × {height:,} pixels",
            expected=f"at most {MAX_PIXELS:,}",
            fix="Scale the image down",
        )


def _whole_patches(size: tuple[int, int], patch: int, largest: int) -> tuple[int, int]:
    """Return width and height, at most `largest` and rounded to whole patches.

    >>> _whole_patches((640, 480), 16, 224), _whole_patches((1, 1000), 16, 224), _whole_patches((30, 20), 16, 224)
    ((224, 160), (16, 224), (32, 16))
    """
    scale = min(1.0, largest / max(size))
    width, height = (patch * min(max(round(side * scale / patch), 1), largest // patch) for side in size)
    return width, height


def _on_white(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip all but the darkest of the 16-bit greys
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
