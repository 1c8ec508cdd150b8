"""Read Markdown: sections by heading level → blocks → sentences or lines → tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hsa.errors import MissingExtra
from hsa.signals.readers.html import text_blocks
from hsa.signals.readers.outline import build_signal
from hsa.signals.readers.text import check_text, lines, normalize_newlines, sentences
from hsa.signals.signal import Signal

if TYPE_CHECKING:
    from markdown_it.token import Token
    from markdown_it.tree import SyntaxTreeNode

# A first line of dashes opens front matter if text follows in the next line; otherwise it is a rule.
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?=[^\n]*\S).*?^(?:---|\.\.\.)[ \t]*$", re.DOTALL | re.MULTILINE)
_DEEPEST = 100  # levels of quotes, lists and their items; the marks of deeper ones are read as text
_MOST_BRACKETS = 2_000  # in a paragraph; above that no links are looked for, because that takes quadratic time


def read_markdown(text: str, tokenizer: Any = None, language: str = "en", *, where: str = "markdown") -> Signal:
    """Read a Markdown text: a `Sequence` of blocks and sections, which nest as their headings do.

    | Markdown               | becomes                                                                            |
    |------------------------|------------------------------------------------------------------------------------|
    | heading and what follows | a section, `Table("heading", "body")`: sentences → tokens; blocks and subsections |
    | paragraph              | sentences → tokens; images give their descriptions, links their texts              |
    | list                   | items → blocks                                                                     |
    | quote                  | blocks                                                                             |
    | code block             | lines → tokens                                                                     |
    | table                  | rows → cells → sentences → tokens                                                  |
    | HTML block             | its blocks, as in `read_html`                                                      |

    A heading with nothing under it is a `Table("heading")`. Front matter, rules and comments are left out.

    Args:
        text: Markdown text.
        tokenizer, language: As in `read_text`.
        where: Name of the text in error messages.

    Raises:
        InvalidInput: For a text without words, or an object that is not a tokenizer.
        MissingExtra: If `markdown-it-py`, `selectolax`, `sentencex` or `tokenizers` is not installed.

    >>> print(read_markdown("# Rivers\\n\\nThey flow.\\n\\n## The Rhine\\n\\n- long\\n- wide").show())
    Sequence(1) · 8 leaves · text
    └─ [0] Table('heading', 'body') · 8 leaves · text
       ├─ .heading Sequence(1) · 1 leaf · text
       │  └─ [0] Sequence(1) · 1 leaf · text · 'Rivers'
       └─ .body Sequence(2) · 7 leaves · text
          ├─ [0] Sequence(1) · 3 leaves · text
          │  └─ [0] Sequence(3) · 3 leaves · text · 'They' 'flow' '.'
          └─ [1] Table('heading', 'body') · 4 leaves · text
             ├─ .heading Sequence(1) · 2 leaves · text
             │  └─ [0] Sequence(2) · 2 leaves · text · 'The' 'Rhine'
             └─ .body Sequence(1) · 2 leaves · text
                └─ [0] Sequence(2) · 2 leaves · text
    ...
    """
    try:
        from markdown_it import MarkdownIt
        from markdown_it.tree import SyntaxTreeNode
    except ImportError:
        raise MissingExtra("markdown-it-py", "readers", "reading Markdown") from None

    body = _FRONT_MATTER.sub("", normalize_newlines(check_text(text, where)))
    parser = MarkdownIt("commonmark", {"maxNesting": 2 * _DEEPEST}).enable(["table", "strikethrough"])
    for name in ("blockquote", "list"):
        _restrict(parser.block.ruler, name, lambda state: state.level < _DEEPEST)
    for name in ("link", "image"):
        _restrict(parser.inline.ruler, name, lambda state: _may_have_links(state.src))
    tokens = parser.parse(body)
    for token in tokens:
        if token.type == "inline":  # here and not in the tree, because the tree recurses into emphasis
            token.content, token.children = "".join(map(_piece, token.children or ())), []
    return build_signal(_blocks(SyntaxTreeNode(tokens).children, language, where), tokenizer, where=where)


def _restrict(ruler: Any, name: str, is_allowed: Callable[[Any], bool]) -> None:
    """Switch a rule of the parser off wherever `is_allowed` of the parser's state is false."""
    rule = next(rule for rule in ruler.__rules__ if rule.name == name)
    apply = rule.fn
    ruler.at(name, lambda state, *position: is_allowed(state) and apply(state, *position), {"alt": rule.alt})


@lru_cache(maxsize=1)
def _may_have_links(paragraph: str) -> bool:
    return paragraph.count("[") <= _MOST_BRACKETS


def _piece(token: Token) -> str:
    """Return the text of a part of a paragraph; tags and the marks of emphasis and links have none."""
    if token.type in ("softbreak", "hardbreak"):
        return " "
    # The content of an image is its description.
    return token.content if token.type in ("text", "text_special", "code_inline", "image") else ""


def _blocks(nodes: Iterable[SyntaxTreeNode], language: str, where: str) -> list[Any]:
    """Return the outline of blocks, with the blocks under each heading in its section."""
    outline: list[Any] = []
    open_sections = [(0, outline)]  # level of the heading, body
    for node in nodes:
        if node.type == "heading":
            level = int(node.tag.removeprefix("h"))
            while open_sections[-1][0] >= level:
                open_sections.pop()
            body: list[Any] = []
            open_sections[-1][1].append({"heading": _sentences(node, language), "body": body})
            open_sections.append((level, body))
        else:
            open_sections[-1][1].extend(_block(node, language, where))
    return outline


def _block(node: SyntaxTreeNode, language: str, where: str) -> list[Any]:
    """Return the outline of a block other than a heading: one entry, or an entry per block of HTML."""
    if node.type in ("fence", "code_block"):
        return [lines(node.content)]
    if node.type == "html_block":
        return text_blocks(node.content, language, where=where)
    if node.type == "table":
        rows = [row for part in node.children for row in part.children]
        return [[[_sentences(cell, language) for cell in row.children] for row in rows]]
    if node.type in ("bullet_list", "ordered_list"):
        return [[_blocks(item.children, language, where) for item in node.children]]
    if node.type == "blockquote":
        return [_blocks(node.children, language, where)]
    return [_sentences(node, language)]


def _sentences(node: SyntaxTreeNode, language: str) -> list[str]:
    return sentences("".join(child.content for child in node.children if child.type == "inline"), language)
