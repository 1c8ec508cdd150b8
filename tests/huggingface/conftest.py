import pytest

from hsa.huggingface import layer_plan, settings


@pytest.fixture(autouse=True)
def _short_sequences_too(monkeypatch):
    """Use trees for short sequences too, on which converted layers would attend exactly."""
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", lambda settings, length, causal: False)
    monkeypatch.setattr(settings, "EXACT_UNTIL", 0)
    settings._resolve.cache_clear()
    yield
    settings._resolve.cache_clear()
