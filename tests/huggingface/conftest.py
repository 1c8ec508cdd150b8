import pytest

from hsa.huggingface import layer_plan


@pytest.fixture(autouse=True)
def _short_sequences_too(monkeypatch):
    """The texts of tests are so short that converted layers would attend exactly; here they do what is tested."""
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", lambda settings, length, causal: False)
