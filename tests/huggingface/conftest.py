import pytest

from hsa.huggingface import layer_plan


@pytest.fixture(autouse=True)
def _short_sequences_too(monkeypatch):
    """Use trees for short sequences too, on which converted layers would attend exactly."""
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", lambda settings, length, causal: False)
