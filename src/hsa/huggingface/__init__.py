"""Attention over trees in pre-trained transformers models, and frozen encoders as embeddings.

`convert` and `revert` change a model, `counting` counts its operations.
Functions load when they are first used, and `convert` registers `attn_implementation="hsa"` with transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsa.huggingface.cache import memory_of, new_cache
    from hsa.huggingface.conversion import convert, convert_as, revert, settings_of
    from hsa.huggingface.interface import register
    from hsa.huggingface.observe import counting

_HOMES = {
    "convert": "conversion",
    "convert_as": "conversion",
    "counting": "observe",
    "memory_of": "cache",
    "new_cache": "cache",
    "register": "interface",
    "revert": "conversion",
    "settings_of": "conversion",
}

__all__ = [
    "convert",
    "convert_as",
    "counting",
    "memory_of",
    "new_cache",
    "register",
    "revert",
    "settings_of",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"hsa.huggingface.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'hsa.huggingface' has no attribute {name!r}")
