"""Properties of the current forward pass: its token ids, and whether it is a decoding step."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hsa.huggingface.vocabulary import Vocabulary

CURRENT: ContextVar[Pass | None] = ContextVar("hsa_pass", default=None)
IN_STEP: ContextVar[bool] = ContextVar("hsa_in_step", default=False)
"""Whether the current forward pass is a `DecodingStep`: layers attend to their caches, without masks."""


@dataclass(frozen=True)
class Pass:
    """Forward pass of a converted model, with the token ids that a hook recorded."""

    ids: Tensor | None
    vocabulary: Vocabulary
    outer: Pass | None


def known_tokens() -> dict[str, Any]:
    """Return the token ids and vocabulary of the current pass as arguments of `Sequences`."""
    current = CURRENT.get()
    return {} if current is None else {"ids": current.ids, "vocabulary": current.vocabulary}
