"""Estimate how long a page takes to parse.

HTML parsers are linear in ordinary pages and worse in some others: a tag is compared with all tags that are open, an
attribute with all attributes of its tag, an option with all options of its list, and every block repeats the formatting
that was left open before it. A page of two megabytes can take hours or all memory, so the work is counted before the
parser starts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set

from hsa.errors import InvalidInput

_FREE_TAGS, _FREE_LENGTH = 500, 50_000  # pages below both limits take less than a second, whatever is in them
_MOST_STEPS = 500_000_000  # a few seconds, or a few hundred megabytes
_STEPS_PER_TAG = 2_000  # microseconds; far more than ordinary pages take
_REPEATED = 150  # steps, of some nanoseconds, to repeat formatting in a block
_REORDERED = 64  # steps per open element to end formatting that overlaps with a block
_OPTION = 3  # steps per option of a list for the next one
_SCOPE = 50  # steps to look through a scope, here and not in the parser
_MOST_OVERLAP = 6  # blocks; the parser gives up above
_MOST_EQUAL = 3  # equal formatting that is repeated

_ATTRIBUTE = (
    r"[^\t\n\f\r />][^\t\n\f\r />=]*+"
    r"(?:[\t\n\f\r ]*+=[\t\n\f\r ]*+(?:\"[^\"]*+\"?|'[^']*+'?|[^\t\n\f\r >\"'][^\t\n\f\r >]*+)?)?+"
)
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_TAG = r"<(?P<end>/?)(?P<name>[a-zA-Z][^\t\n\f\r />]*+)(?P<attributes>(?:[\t\n\f\r /]++|" + _ATTRIBUTE + r")*+)"
_TAGS = re.compile(_TAG)
_MARKUP = re.compile(r"<!--(?:-?>|.*?(?:--!?>|\Z))|<[!?][^>]*+|</(?![a-zA-Z])[^>]*+|" + _TAG, re.DOTALL)
_RAW_TAGS = "iframe noembed noframes noscript script style textarea title xmp"
_RAW = frozenset(_RAW_TAGS.split())
_FORMATTING_TAGS = "a b big code em font i nobr s small strike strong tt u"
_FORMATTING = frozenset(_FORMATTING_TAGS.split())
# Tags that end by themselves: they cannot pile up without others between them.
_SINGLE_TAGS = (
    "area base body br col colgroup dd dt embed frame head hr html img input keygen li link meta optgroup option p param "
    "rb rp rt rtc source tbody tfoot thead tr track wbr"
)
_SINGLE = frozenset(_SINGLE_TAGS.split())
_CELLS = frozenset({"td", "th", "caption"})
_ROWS = frozenset({"tr", "tbody", "thead", "tfoot"})
_FOREIGN = frozenset({"svg", "math"})
_SCOPES = (
    _CELLS | _FOREIGN | {"table", "object", "template", "applet", "marquee"}
)  # end tags have no effect across these


def check_cost(page: str, where: str) -> None:
    """Raise for a page that takes the parser too long.

    Raises:
        InvalidInput: For a page with very deep nesting, or very much formatting or very many attributes that pile up.
    """
    if len(page) <= _FREE_LENGTH and page.count("<") <= _FREE_TAGS:
        return
    tree, steps, tags, at = _OpenTags(), 0, 0, 0
    while (markup := (_TAGS if tree.is_foreign else _MARKUP).search(page, at)) is not None:  # SVG has other comments
        at = markup.end()
        if markup["name"] is None:
            continue
        name, tags = markup["name"].lower(), tags + 1
        if markup["end"]:
            steps += tree.end(name)
        else:
            attributes = markup["attributes"]
            steps += tree.start(name, attributes)
            if len(attributes) > 2_000:
                steps += len(_ATTRIBUTES.findall(attributes)) ** 2 // 2
            if name in _RAW and not tree.is_foreign:
                tree.end(name)  # nothing nests in it
                at = _end_of_raw_text(page, name, at)
        if steps > _MOST_STEPS + _STEPS_PER_TAG * tags:
            raise InvalidInput(
                where,
                got="tags that are nested too deeply, or pile up because they are not closed",
                expected="a page that can be parsed in seconds",
                fix="Repair it, or extract its text and read that with read_text",
            )


def _end_of_raw_text(page: str, name: str, at: int) -> int:
    end = re.compile(rf"</{name}(?=[\t\n\f\r />])", re.IGNORECASE).search(page, at)
    return len(page) if end is None else end.start()


class _Scope:
    """Elements that are open inside a table cell or the like."""

    def __init__(self, name: str):
        self.name = name
        self.open: list[str] = []
        self.counts: Counter[str] = Counter()  # of the names in `open`
        self.formatting: dict[str, list[tuple[str, int]]] = {}  # by name: tag, and length of `open` when it began
        self.equal: Counter[str] = Counter()  # formatting by tag
        self.repeated = 0  # formatting that each block repeats

    @property
    def size(self) -> int:
        return 1 + len(self.open) + self.equal.total()


class _OpenTags:
    """Model of the elements that a parser holds open. Where it is rough, it takes too many for open."""

    def __init__(self) -> None:
        self.scopes = [_Scope("")]
        self.size = 0  # open elements of all scopes
        self.options = 0  # of the list that is open

    @property
    def is_foreign(self) -> bool:
        return self.scopes[-1].name in _FOREIGN

    def start(self, name: str, attributes: str) -> int:
        """Open an element and return the steps that it takes."""
        steps = 0
        if name in _CELLS or name in _ROWS:
            steps += self._leave(_CELLS)
        elif name in ("a", "nobr"):  # end the one before
            self.end(name)
        scope = self.scopes[-1]
        steps += self.size if name in _FORMATTING else self.size + _REPEATED * scope.repeated
        if name in ("select", "option"):
            self.options = 0 if name == "select" else self.options + 1
            steps += _OPTION * self.options
        if name in _SINGLE or (self.is_foreign and attributes.endswith("/")):
            return steps
        self.size += 1
        if name in _SCOPES:
            self.scopes.append(_Scope(name))
        elif name in _FORMATTING:
            tag = name + attributes
            scope.formatting.setdefault(name, []).append((tag, len(scope.open)))
            scope.equal[tag] += 1
            scope.repeated += scope.equal[tag] <= _MOST_EQUAL
        else:
            scope.open.append(name)
            scope.counts[name] += 1
        return steps

    def end(self, name: str) -> int:
        """Close an element, with those inside it, and return the steps that it takes."""
        scope, steps = self.scopes[-1], self.size
        if name in _SCOPES:
            steps += self._leave({name})
        elif scope.formatting.get(name) and not self.is_foreign:
            tag, blocks = scope.formatting[name][-1]
            overlap = len(scope.open) - blocks
            if overlap > 0:
                steps *= _REORDERED
            if overlap <= _MOST_OVERLAP:
                scope.formatting[name].pop()
                scope.repeated -= scope.equal[tag] <= _MOST_EQUAL
                scope.equal[tag] -= 1
                self.size -= 1
        elif scope.counts[name] and not self.is_foreign:
            while (closed := scope.open.pop()) != name:
                scope.counts[closed] -= 1
                self.size -= 1
            scope.counts[name] -= 1
            self.size -= 1
        return steps

    def _leave(self, names: Set[str]) -> int:
        """Leave the innermost scope of these names, if it is in the same table, and return the steps that it takes."""
        steps = 0
        for i in range(len(self.scopes) - 1, 0, -1):
            name = self.scopes[i].name
            if name in names:
                self.size -= sum(scope.size for scope in self.scopes[i:])
                del self.scopes[i:]
                break
            if name in ("table", "template"):
                break
            steps += _SCOPE
        return steps
