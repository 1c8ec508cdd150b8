"""Read a file with the reader for its suffix."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from hsa.errors import InvalidInput
from hsa.signals.readers.html import load_html, read_html, visible_text
from hsa.signals.readers.image import read_image
from hsa.signals.readers.json_document import read_json
from hsa.signals.readers.markdown import read_markdown
from hsa.signals.readers.python_source import load_python, read_python
from hsa.signals.readers.text import load_text, read_text
from hsa.signals.signal import Leaf, Signal

KINDS = {
    "text": (".txt",),
    "markdown": (".md", ".markdown"),
    "html": (".html", ".htm"),
    "python": (".py",),
    "json": (".json",),
    "image": (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp"),
}
SUFFIXES = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}

_LOADERS: dict[str, Callable[[Path], str]] = {"html": load_html, "python": load_python}


def read_file(
    path: str | PathLike[str],
    tokenizer: Any = None,
    language: str = "en",
    *,
    image_reader: Callable[..., Signal | Leaf] = read_image,
    on_bad: Literal["raise", "skip"] = "raise",
) -> Signal | Leaf:
    """Read a file with the reader for its suffix (see `SUFFIXES`).

    The images of a web page are read from the folder of the page. For a whole site see `read_site`, for the rows of a
    table `load_rows`.

    Args:
        path: File to read.
        tokenizer, language: As in `read_text`.
        image_reader: Function that reads an image, such as `functools.partial(read_image, patch=8)`.
        on_bad: Whether a bad image in a web page raises or is skipped, as in `read_html`.

    Raises:
        InvalidInput: For an unknown suffix, or a file that its reader refuses; the message names the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "double.py")
    ...     _ = path.write_text("def double(x):\\n    return 2 * x\\n")
    ...     read_file(path)
    Signal(Sequence(1), 10 leaves, 4 families, depth 3, text)
    """
    path = Path(path)
    kind = _kind(path)
    where = str(path)
    if kind == "image":
        return image_reader(path)
    text = _load(path, kind)
    if kind == "html":
        return read_html(
            text,
            tokenizer,
            language,
            folder=path.parent,
            page=path.name,
            image_reader=image_reader,
            on_bad=on_bad,
            where=where,
        )
    if kind == "python":
        return read_python(text, tokenizer, where=where)
    read = {"text": read_text, "markdown": read_markdown, "json": read_json}[kind]
    return read(text, tokenizer, language, where=where)


def text_of(path: str | PathLike[str]) -> str | None:
    """Return the text of a file, to train a tokenizer on: the visible text of a web page, None for an image.

    Raises:
        InvalidInput: For an unknown suffix or a file that cannot be read; the message names the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "page.html")
    ...     _ = path.write_text("<title>Rivers</title>")
    ...     text_of(path)
    'Rivers'
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "image":
        return None
    text = _load(path, kind)
    return visible_text(text, where=str(path)) if kind == "html" else text


def _kind(path: Path) -> str:
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise InvalidInput(str(path), got=f"the suffix {path.suffix!r}", expected=f"one of {', '.join(SUFFIXES)}")
    return kind


def _load(path: Path, kind: str) -> str:
    return _LOADERS.get(kind, load_text)(path)
