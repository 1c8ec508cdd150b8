"""Token ids of the forward pass that is running, for layers whose trees or sinks depend on them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hsa.huggingface.vocabulary import Vocabulary

CURRENT: ContextVar[Pass | None] = ContextVar("hsa_pass", default=None)


@dataclass(frozen=True)
class Pass:
    """A forward pass of a converted model, with the arguments that hooks noted."""

    ids: Tensor | None
    vocabulary: Vocabulary
    outer: Pass | None


def known_tokens() -> dict[str, Any]:
    """Return what `Sequences` can know about the tokens of the current pass."""
    current = CURRENT.get()
    return {} if current is None else {"ids": current.ids, "vocabulary": current.vocabulary}
