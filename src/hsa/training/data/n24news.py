"""Reader of N24News (Wang et al., 2022): articles of the New York Times with an image each, classified by section.

The layout is that of the archive at github.com/billywzh717/N24News:

    news/nytimes_train.json, nytimes_dev.json, nytimes_test.json    lists of articles
    imgs/IMAGE_ID.jpg                                               images

An article has the keys section, headline, abstract, caption (of the image), article (the body) and image_id. The authors'
download script names the body "body" and the folder "images"; both layouts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from hsa.errors import InvalidInput
from hsa.files import file_inside
from hsa.signals import Leaf, Signal
from hsa.signals.readers import Rows, load_rows, read_image
from hsa.signals.readers.outline import build_signal
from hsa.training.data.data_set import Example

SPLITS = ("train", "dev", "test")
_TEXTS = ("headline", "abstract", "caption")
_BODIES = ("article", "body")
_IMAGE_FOLDERS = ("imgs", "images")
_SOURCE = (
    "Unpack the archive that github.com/billywzh717/N24News links to, and pass the folder that contains news/ and imgs/"
)


class ParagraphEncoder(Protocol):
    """Encoder of paragraphs, such as `hsa.huggingface.encoders.TextEncoder`."""

    def text_vectors(self, texts: list[str], *, prefix: str = "") -> Tensor: ...


class ImageLeafEncoder(Protocol):
    """Encoder of images, such as `hsa.huggingface.encoders.ImageEncoder`."""

    def read_image(self, image: Any, /, *, where: str | None = None) -> Signal | Leaf: ...


def read_n24news(
    folder: str | PathLike[str],
    split: Literal["train", "dev", "test"],
    *,
    tokenizer: Any = None,
    paragraph_encoder: ParagraphEncoder | None = None,
    prefix: str = "",
    image_reader: Callable[..., Signal | Leaf] | None = read_image,
    image_encoder: ImageLeafEncoder | None = None,
    on_bad: Literal["raise", "skip"] = "raise",
) -> Iterator[Example]:
    """Read the articles of a split, each a `Table` of headline, abstract, caption, body and image, with its section.

    Headline, abstract and caption are sequences of tokens; the body is a sequence of paragraphs, one per line. Empty texts
    are left out.

    Args:
        folder: Folder that contains the folders `news` and `imgs`.
        split: Name of the split.
        tokenizer: Tokenizer, as in `read_text`.
        paragraph_encoder: Encoder that turns each paragraph into one leaf of modality "paragraph"; without it a paragraph
            is a sequence of tokens.
        prefix: Text put before each paragraph for its encoder, such as "passage: " for e5.
        image_reader: Function that reads an image, such as `functools.partial(read_image, block=4)`; None to leave images
            out.
        image_encoder: Encoder that turns each image into one leaf of modality "image"; takes precedence over
            `image_reader`. For a grid of vectors: `image_reader=functools.partial(image_encoder.read_image, grid=True)`.
        on_bad: Whether to raise an error for an image that is missing, outside the folder or damaged, or to leave it out
            ("skip").

    >>> import json, tempfile
    >>> article = {"section": "Travel", "headline": "Two days in Rome", "abstract": "", "caption": "", "image_id": "7"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "news").mkdir()
    ...     _ = Path(folder, "news", "nytimes_dev.json").write_text(json.dumps([article | {"article": "Go.\\n\\nStay."}]))
    ...     example, = read_n24news(folder, "dev", image_reader=None)
    >>> print(example.target, example.signal.show(), sep="\\n")
    Travel
    Table('headline', 'body') · 8 leaves · text
    ├─ .headline Sequence(4) · 4 leaves · text · 'Two' 'days' 'in' 'Rome'
    └─ .body Sequence(2) · 4 leaves · text
       ├─ [0] Sequence(2) · 2 leaves · text · 'Go' '.'
       └─ [1] Sequence(2) · 2 leaves · text · 'Stay' '.'

    Raises:
        InvalidInput: At once: another layout, no file for this split, invalid JSON, a missing key. While reading, with
            file and article: a missing value, an image that cannot be read.
    """
    if split not in SPLITS:
        raise InvalidInput("split", got=repr(split), expected=f"one of {', '.join(SPLITS)}")
    root = Path(folder)
    rows = _load(root, split)
    body = next((name for name in _BODIES if name in rows.columns), _BODIES[0])
    for name in ("section", *_TEXTS, body, "image_id"):
        rows.column(name)  # raises an error that lists the existing columns
    read_one_image = image_reader if image_encoder is None else image_encoder.read_image
    images = None if read_one_image is None else _image_folder(root)

    def outline(row: dict[str, Any], where: str) -> dict[str, Any]:
        parts: dict[str, Any] = {name: _text(row, name, where) for name in _TEXTS}
        paragraphs = [line.strip() for line in _text(row, body, where).splitlines() if line.strip()]
        if paragraph_encoder is None or not paragraphs:
            parts["body"] = paragraphs
        else:
            parts["body"] = Signal.of(paragraph_encoder.text_vectors(paragraphs, prefix=prefix).cpu(), "paragraph")
        if read_one_image is not None and images is not None:
            name = f"{images.name}/{row['image_id']}.jpg"
            image = f"{where}, image {name}"
            try:
                path = file_inside(root, name, image, expected=f"an image in {images}")
                parts["image"] = read_one_image(path, where=image)
            except InvalidInput:
                if on_bad == "raise":
                    raise
        return parts

    def examples() -> Iterator[Example]:
        for index in range(len(rows)):
            row = rows.row(index)
            where = rows.where(index) + (f" (article {row['article_id']})" if row.get("article_id") else "")
            signal = build_signal(outline(row, where), tokenizer, where=where)
            yield Example(signal, _text(row, "section", where), where)

    return examples()


def _load(root: Path, split: str) -> Rows:
    news = root / "news"
    if not news.is_dir():
        names = sorted(path.name for path in root.iterdir())[:8] if root.is_dir() else []
        problem = f"the folder contains {', '.join(names) or 'nothing'}" if root.is_dir() else "no such folder"
        raise InvalidInput(str(root), problem=problem, expected="the folders news and imgs", fix=_SOURCE)
    path = news / f"nytimes_{split}.json"
    if not path.is_file():
        raise InvalidInput(
            str(path), problem="no such file", expected=f"the articles of the {split} split", fix=_SOURCE
        )
    return load_rows(path)


def _image_folder(root: Path) -> Path:
    for name in _IMAGE_FOLDERS:
        if (root / name).is_dir():
            return root / name
    raise InvalidInput(
        str(root),
        problem="no folder imgs",
        expected="the images of the articles",
        fix=f"{_SOURCE}, or leave images out with image_reader=None",
    )


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        got = "null" if value is None else f"a value of type {type(value).__name__}"
        raise InvalidInput(f"{where}, {name!r}", got=got, expected="text")
    return value
