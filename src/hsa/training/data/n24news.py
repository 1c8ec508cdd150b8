"""N24News (Wang et al., 2022): articles of the New York Times with a picture each, to be told which section they are from.

The layout is that of the archive at github.com/billywzh717/N24News:

    news/nytimes_train.json, nytimes_dev.json, nytimes_test.json    lists of articles
    imgs/IMAGE_ID.jpg                                               their pictures

An article has the keys section, headline, abstract, caption (of the picture), article (the body) and image_id. The authors'
script that downloads everything anew names the body "body" and the folder "images"; both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from hsa.errors import InvalidInput
from hsa.signals import Leaf, Signal
from hsa.signals.readers import Rows, load_rows, read_image
from hsa.signals.readers.outline import build_signal
from hsa.training.data.data_set import Example

SPLITS = ("train", "dev", "test")
_TEXTS = ("headline", "abstract", "caption")
_BODIES = ("article", "body")
_IMAGE_FOLDERS = ("imgs", "images")
_SOURCE = (
    "unpack the archive that github.com/billywzh717/N24News links to, and give the folder with news/ and imgs/ in it"
)


class ParagraphEncoder(Protocol):
    """Such as `hsa.huggingface.encoders.TextEncoder`."""

    def text_vectors(self, texts: list[str], *, prefix: str = "") -> Tensor: ...


class PictureEncoder(Protocol):
    """Such as `hsa.huggingface.encoders.ImageEncoder`."""

    def read_image(self, picture: Any, *, where: str | None = None) -> Signal | Leaf: ...


def read_n24news(
    folder: str | PathLike[str],
    split: Literal["train", "dev", "test"],
    *,
    tokenizer: Any = None,
    paragraph_encoder: ParagraphEncoder | None = None,
    prefix: str = "",
    image_reader: Callable[..., Signal | Leaf] | None = read_image,
    image_encoder: PictureEncoder | None = None,
    on_bad: Literal["raise", "skip"] = "raise",
) -> Iterator[Example]:
    """The articles of a split, each a `Table` of headline, abstract, caption, body and image, with its section.

    Headline, abstract and caption are sequences of tokens; the body is a sequence of paragraphs, its lines. Empty texts are
    left out.

    Args:
        folder: with the folders `news` and `imgs` in it.
        tokenizer: as in `read_text`.
        paragraph_encoder: makes one leaf of modality "paragraph" of each paragraph, a vector; without it a paragraph is a
            sequence of tokens.
        prefix: put before each paragraph for its encoder, such as "passage: " for e5.
        image_reader: makes the signal of a picture, such as `functools.partial(read_image, block=4)`; None leaves pictures
            out.
        image_encoder: makes one leaf of modality "image" of each picture, a vector; it goes before `image_reader`. For a
            grid of vectors: `image_reader=functools.partial(image_encoder.read_image, grid=True)`.
        on_bad: what to do about a picture that is not there or cannot be read: raise, or leave it out.

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
        InvalidInput: at once: another layout, no file of this split, JSON that is none, a key that no article has. While
            reading, naming file and article: a value that is missing, a picture that cannot be read.
    """
    if split not in SPLITS:
        raise InvalidInput("split", given=repr(split), expected=f"one of {', '.join(SPLITS)}")
    root = Path(folder)
    rows = _load(root, split)
    body = next((name for name in _BODIES if name in rows.columns), _BODIES[0])
    for name in ("section", *_TEXTS, body, "image_id"):
        rows.column(name)  # raises, naming those there are
    read_picture = image_reader if image_encoder is None else image_encoder.read_image
    pictures = None if read_picture is None else _image_folder(root)

    def outline(row: dict[str, Any], where: str) -> dict[str, Any]:
        parts: dict[str, Any] = {name: _text(row, name, where) for name in _TEXTS}
        paragraphs = [line.strip() for line in _text(row, body, where).splitlines() if line.strip()]
        if paragraph_encoder is None or not paragraphs:
            parts["body"] = paragraphs
        else:
            parts["body"] = Signal.of(paragraph_encoder.text_vectors(paragraphs, prefix=prefix).cpu(), "paragraph")
        if read_picture is not None and pictures is not None:
            path = pictures / f"{row['image_id']}.jpg"
            try:
                parts["image"] = read_picture(path, where=f"{where}, image {path}")
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
        names = sorted(path.name for path in root.iterdir())[:8] if root.is_dir() else None
        raise InvalidInput(
            str(root),
            given="no such folder" if names is None else f"a folder with {', '.join(names) or 'nothing in it'}",
            expected="the folders news and imgs",
            fix=_SOURCE,
        )
    path = news / f"nytimes_{split}.json"
    if not path.is_file():
        raise InvalidInput(str(path), given="no such file", expected=f"the articles of the {split} split", fix=_SOURCE)
    return load_rows(path)


def _image_folder(root: Path) -> Path:
    for name in _IMAGE_FOLDERS:
        if (root / name).is_dir():
            return root / name
    raise InvalidInput(
        str(root),
        given="no folder imgs",
        expected="the pictures of the articles",
        fix=f"{_SOURCE}; or leave pictures out: image_reader=None",
    )


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        given = "nothing" if value is None else f"a {type(value).__name__}"
        raise InvalidInput(f"{where}, {name!r}", given=given, expected="a text")
    return value
