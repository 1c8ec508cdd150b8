"""Hierarchical attention in pre-trained transformers models, and frozen encoders as embeddings.

`convert` and `revert` change a model; `calibrate` finds settings for a budget; `counting` counts operations. Functions load,
and register `attn_implementation="hsa"` with transformers, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsa.huggingface.attend import counting
    from hsa.huggingface.conversion import convert, revert, settings_of
    from hsa.huggingface.interface import register

_HOMES = {
    "convert": "conversion",
    "counting": "attend",
    "register": "interface",
    "revert": "conversion",
    "settings_of": "conversion",
}

__all__ = ["convert", "counting", "register", "revert", "settings_of"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"hsa.huggingface.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'hsa.huggingface' has no attribute {name!r}")
