"""Fonts of pictures: a fallback for Chinese, Japanese and Korean, and a warning about characters that no font has."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from hsa.errors import HsaWarning

FALLBACKS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP"),
    *("Source Han Sans SC", "Source Han Sans", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback"),
    *("PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS"),
    *("Microsoft YaHei", "SimHei", "Yu Gothic", "MS Gothic", "Malgun Gothic"),
    *("IPAexGothic", "IPAGothic", "TakaoGothic", "NanumGothic", "Unifont"),
)
"""Fonts with Chinese, Japanese or Korean characters, the best first."""
_MISSING = re.compile(r"Glyph (\d+) .*missing")
_warned = False


@cache
def fallbacks() -> list[str]:
    """Return the fonts of `FALLBACKS` that are installed."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in FALLBACKS if name in installed]


def add_fallbacks(figure: Any) -> None:
    """Draw characters that the font of a text lacks with the installed fallbacks."""
    from matplotlib.text import Text

    for text in figure.findobj(Text) if fallbacks() else ():
        text.set_fontfamily([*text.get_fontfamily(), *fallbacks()])


@contextmanager
def noting_missing_characters() -> Iterator[None]:
    """Replace matplotlib's warnings about characters that no font has by one that says what to do, once per process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Glyph .* missing")
        yield
    missing = [match for warning in caught if (match := _MISSING.match(str(warning.message)))]
    for warning in caught:
        if not _MISSING.match(str(warning.message)):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if missing:
        _warn(chr(int(missing[0][1])))


def _warn(character: str) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    import matplotlib

    warnings.warn(
        f"no installed font has the character {character!r}, so a picture shows a box in its place. Install a font that has "
        f"it, for example Noto Sans CJK, and delete the list of fonts in {matplotlib.get_cachedir()}",
        HsaWarning,
        stacklevel=3,
    )
