"""Read a web page as a set of blocks, or a folder of pages as a graph along their links."""

from __future__ import annotations

import codecs
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from hsa.errors import InvalidInput, MissingExtra
from hsa.files import file_inside, is_inside
from hsa.signals.domains import Graph
from hsa.signals.readers.html_cost import check_cost
from hsa.signals.readers.image import read_image
from hsa.signals.readers.outline import Unordered, build_signal
from hsa.signals.readers.text import check_text, decode_as, decode_text, lines, load_bytes, sentences
from hsa.signals.readers.tokens import encodable, load_tokenizer
from hsa.signals.signal import Leaf, Signal

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_NEVER_SHOWN = frozenset({"script", "style", "noscript", "template", "iframe", "noembed", "noframes"})
_BLOCK_TAGS = (
    "address article aside blockquote body button caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav ol optgroup option p pre "
    "search section select summary table tbody td textarea tfoot th thead title tr ul"
)
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_CHARSET = re.compile(rb"<meta[^>]*?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}

# A piece of a page: a run of text, preformatted text, the source of an image, or the target of a link.
_Piece = tuple[Literal["text", "lines", "picture", "link"], str]


def read_html(
    text: str,
    tokenizer: Any = None,
    language: str = "en",
    *,
    folder: str | PathLike[str] | None = None,
    page: str = "index.html",
    image_reader: Callable[..., Signal | Leaf] = read_image,
    on_bad: Literal["raise", "skip"] = "raise",
    left_out: list[str] | None = None,
    where: str = "html",
) -> Signal:
    """Read a web page as a `Set` of blocks: paragraphs, headings, list items, table cells, images and the like.

    A block is the content between tags that begin a new line; preformatted text becomes lines → tokens, other text
    sentences → tokens. Broken HTML is read as browsers read it. Scripts, style sheets, templates and frames are left out;
    CSS is not applied, so that hidden text is read.

    Args:
        text: HTML of the page.
        tokenizer, language: As in `read_text`.
        folder: Folder of the images; nothing outside it is opened. Without it images are left out. Images on other
            sites and in `data:` addresses are always left out.
        page: Path of this page in the folder; addresses of images are relative to it.
        image_reader: Function that reads an image, such as `functools.partial(read_image, patch=8)`.
        on_bad: "raise" raises for an image that is not in the folder or cannot be read, "skip" leaves it out.
        left_out: List to which the names of such images are added.
        where: Name of the page in error messages.

    Raises:
        InvalidInput: For a page without text and images, a bad image, an object that is not a tokenizer, or nesting
            so deep that parsing would take minutes.
        MissingExtra: If `selectolax`, `pillow`, `sentencex` or `tokenizers` is not installed.

    >>> print(read_html("<title>Rivers</title><h1>The Rhine</h1><p>It is <b>long</b>.<p>And wide.").show())
    Set(4) · 10 leaves · text
    ├─ [0] Sequence(1) · 1 leaf · text
    │  └─ [0] Sequence(1) · 1 leaf · text · 'Rivers'
    ├─ [1] Sequence(1) · 2 leaves · text
    │  └─ [0] Sequence(2) · 2 leaves · text · 'The' 'Rhine'
    ...
    """
    pictures = _Pictures(None if folder is None else Path(folder), image_reader, on_bad, left_out)
    return _page(_pieces(check_text(text, where), where), tokenizer, language, pictures, page, where)


def read_site(
    folder: str | PathLike[str],
    tokenizer: Any = None,
    language: str = "en",
    *,
    image_reader: Callable[..., Signal | Leaf] = read_image,
    on_bad: Literal["raise", "skip"] = "raise",
    left_out: list[str] | None = None,
) -> Signal:
    """Read a folder of web pages as a `Graph`: its members are the pages, in the order of their paths, its edges the links.

    Pages are the files with the suffixes .html and .htm, in the folder and its subfolders. A link to a folder leads to its
    index page, and a link without a suffix to the page of that name, as on web servers. Nothing outside the folder is
    opened, not even through symbolic links.

    Args:
        folder: Folder of the site.
        tokenizer, language: As in `read_text`.
        image_reader, on_bad, left_out: As in `read_html`.

    Raises:
        InvalidInput: For a folder without pages, a page without text and images, or a bad image; the message names
            the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "index.html").write_text("See the <a href=rhine>Rhine</a>.")
    ...     _ = Path(folder, "rhine.html").write_text("It is long. <a href='/'>Home</a>")
    ...     read_site(folder)
    Signal(Graph(2 nodes, 2 edges), 9 leaves, 8 families, depth 4, text)
    """
    root = Path(folder)
    pages = {name: number for number, name in enumerate(_pages(root))}
    if not pages:
        problem = "no .html files" if root.is_dir() else "no such folder"
        raise InvalidInput(str(folder), problem=problem, expected="a folder of web pages")
    tokenizer = load_tokenizer(tokenizer)
    pictures = _Pictures(root, image_reader, on_bad, left_out)
    members = []
    edges: dict[tuple[int, int], None] = {}  # in order, each once
    for name, number in pages.items():
        pieces = list(_pieces(load_html(root / name), str(root / name)))
        members.append(_page(pieces, tokenizer, language, pictures, name, str(root / name)))
        targets = [_target(reference, name, pages) for kind, reference in pieces if kind == "link"]
        edges.update({(number, target): None for target in targets if target is not None and target != number})
    return Signal(Graph(len(pages), list(edges)), members)


def text_blocks(text: str, language: str, *, where: str = "html") -> list[list[str]]:
    """Return the sentences or lines of each block of text in a page or a part of one.

    >>> text_blocks("<p>It rained. It snowed.<pre>a = 1", "en")
    [['It rained.', 'It snowed.'], ['a = 1']]
    """
    blocks = (_text_block(kind, content, language) for kind, content in _pieces(text, where))
    return [block for block in blocks if block is not None]


def visible_text(text: str, *, where: str = "html") -> str:
    """Return the text of a page, with a blank line between blocks.

    >>> print(visible_text("<title>Rivers</title><script>let x</script><p>They <b>flow</b>."))
    Rivers
    <BLANKLINE>
    They flow.
    """
    return "\n\n".join(content for kind, content in _pieces(text, where) if kind in ("text", "lines"))


def load_html(path: str | PathLike[str]) -> str:
    """Load the text of a page in the encoding that it declares; by default as UTF-8 if it is valid, else as Windows-1252.

    Raises:
        InvalidInput: For a file that cannot be read or is binary.
    """
    data = load_bytes(path)
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    if b"\0" in data:
        return decode_text(data, where=str(path))
    named = _CHARSET.search(data, 0, 1024)  # browsers look no further
    label = named[1].decode("ascii", "replace").lower() if named else "utf-8"
    if label in ("iso-8859-1", "latin1", "us-ascii", "ascii"):  # browsers take these for Windows-1252
        label = "windows-1252"
    try:
        return decode_as(data, "utf-8" if label.startswith("utf") else label)
    except (UnicodeError, LookupError):
        return data.decode("windows-1252", "replace")


@dataclass(frozen=True)
class _Pictures:
    """Options for reading the images of a page."""

    folder: Path | None
    reader: Callable[..., Signal | Leaf]
    on_bad: str
    left_out: list[str] | None

    def __post_init__(self) -> None:
        if self.on_bad not in ("raise", "skip"):
            raise InvalidInput("on_bad", got=repr(self.on_bad), expected="'raise' or 'skip'")

    def read(self, source: str, page: str, where: str) -> Signal | Leaf | None:
        address = _address(source, page)
        if self.folder is None or address is None:
            return None
        name, expected = str(self.folder / address), f"the image that {where} shows"
        fix = "Pass on_bad='skip' to leave such images out"
        try:
            return self.reader(file_inside(self.folder, address, name, expected=expected, fix=fix))
        except InvalidInput:
            if self.on_bad == "raise":
                raise
            if self.left_out is not None:
                self.left_out.append(name)
            return None


def _page(
    pieces: Iterable[_Piece], tokenizer: Any, language: str, pictures: _Pictures, page: str, where: str
) -> Signal:
    blocks: Unordered = Unordered()
    for kind, content in pieces:
        picture = kind == "picture"
        block = pictures.read(content, page, where) if picture else _text_block(kind, content, language)
        if block is not None:
            blocks.append(block)
    return build_signal(blocks, tokenizer, where=where, expected="at least one word or image in the page")


def _text_block(kind: str, content: str, language: str) -> list[str] | None:
    if kind == "text":
        return sentences(content, language)
    return lines(content) if kind == "lines" else None


def _pieces(text: str, where: str) -> Iterator[_Piece]:
    """Yield the pieces of a page. Any tag that begins or ends a block ends a run of text."""
    try:
        from selectolax.lexbor import LexborHTMLParser, SelectolaxError
    except ImportError:
        raise MissingExtra("selectolax", "readers", "reading HTML") from None

    check_cost(text, where)
    collected: list[str] = []
    preformatted = 0  # number of open <pre> tags
    try:
        parser = LexborHTMLParser(
            encodable(text), scripting=True
        )  # else the content of <noscript> may end up outside it
    except SelectolaxError as error:
        raise InvalidInput(where, got=f"a page that cannot be parsed ({error})", expected="HTML") from None
    for node, opens in _tags(parser.root):
        tag = node.tag
        if tag == "-text":
            if opens:
                collected.append(node.text_content or "")
        elif tag == "br":
            collected.append("\n" if opens else "")
        elif tag in _BLOCKS or tag == "img":
            yield from _flush(collected, preformatted > 0)
            if tag == "pre":
                preformatted += 1 if opens else -1
        if opens and tag in ("a", "img"):
            reference = node.attributes.get("href" if tag == "a" else "src")
            if reference:
                yield ("link" if tag == "a" else "picture"), reference


def _flush(collected: list[str], preformatted: bool) -> Iterator[_Piece]:
    text = "".join(collected)
    collected.clear()
    if preformatted and text.strip():
        yield "lines", text
    elif words := text.split():
        yield "text", " ".join(words)


def _tags(root: LexborNode | None) -> Iterator[tuple[LexborNode, bool]]:
    """Yield every node as it opens and as it closes, without recursion: pages may be deeper than Python's stack."""
    node = root
    while node is not None:
        yield node, True
        below = None if node.tag in _NEVER_SHOWN else node.child
        if below is not None:
            node = below
            continue
        while node is not None:
            yield node, False
            beside = None if node.mem_id == root.mem_id else node.next  # type: ignore[union-attr]
            if beside is not None:
                node = beside
                break
            node = None if node.mem_id == root.mem_id else node.parent  # type: ignore[union-attr]


def _pages(root: Path) -> list[str]:
    pages = []
    for folder, _, files in os.walk(root):
        for file in files:
            path = Path(folder, file)
            if path.suffix.lower() in (".html", ".htm") and is_inside(path, root):
                pages.append(path.relative_to(root).as_posix())
    return sorted(pages)


def _address(reference: str, page: str) -> str | None:
    """Return the path in the folder that a page refers to; None if it is elsewhere.

    >>> _address("../b.html#top", "blog/a.html"), _address("/b.html?x", "blog/a.html"), _address("../../b", "blog/a")
    ('b.html', 'b.html', 'b')
    >>> _address("https://example.org/", "a.html"), _address("data:,x", "a.html"), _address("#top", "a.html")
    (None, None, None)
    """
    try:
        parts = urlsplit(reference.strip())
    except ValueError:
        return None
    if parts.scheme or parts.netloc or not parts.path:
        return None
    # Under "/" a path cannot climb above the folder: browsers ignore steps above the root of a site, too.
    return posixpath.normpath(posixpath.join("/", posixpath.dirname(page), unquote(parts.path))).lstrip("/")


def _target(reference: str, page: str, pages: dict[str, int]) -> int | None:
    address = _address(reference, page)
    if address is None:
        return None
    names = (address, posixpath.join(address, "index.html"), posixpath.join(address, "index.htm"), f"{address}.html")
    return next((pages[name] for name in names if name in pages), None)
