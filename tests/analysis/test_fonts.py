"""Characters that fonts lack: fallbacks, and one warning about boxes."""

import warnings
from dataclasses import replace

import pytest

from hsa.analysis import fonts
from hsa.analysis.plots import pyplot, save_figure
from hsa.errors import HsaWarning


@pytest.fixture
def picture(tmp_path):
    def draw(text):
        figure, axes = pyplot().subplots()
        axes.set_title(text)
        axes.set_xticks([0, 1], [text, "b"], fontfamily="monospace")
        save_figure(figure, tmp_path / "a.png")
        return (tmp_path / "a.png").read_bytes()

    return draw


def test_missing_characters_are_named_once(picture, monkeypatch):
    monkeypatch.setattr(fonts, "_warned", False)
    monkeypatch.setattr(fonts, "fallbacks", list)
    with pytest.warns(HsaWarning, match="no installed font has the character '日', so a picture shows a box") as caught:
        picture("日本")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture("本日")


def test_other_warnings_pass():
    with pytest.warns(UserWarning, match="^another$"), fonts.noting_missing_characters():
        warnings.warn("another", stacklevel=1)


def test_fallbacks_are_added_to_the_fonts_of_all_texts(monkeypatch):
    from matplotlib import font_manager

    known = font_manager.fontManager.ttflist
    plain = next(font for font in known if font.name == "DejaVu Sans")
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*known, replace(plain, name="WenQuanYi Zen Hei")])
    fonts.fallbacks.cache_clear()
    figure, axes = pyplot().subplots()
    axes.set_xticks([0], ["x"], fontfamily="monospace")
    fonts.add_fallbacks(figure)
    pyplot().close(figure)
    installed = fonts.fallbacks()
    fonts.fallbacks.cache_clear()
    assert "WenQuanYi Zen Hei" in installed
    assert axes.get_xticklabels()[0].get_fontfamily() == ["monospace", *installed]
    assert axes.title.get_fontfamily() == ["sans-serif", *installed]
