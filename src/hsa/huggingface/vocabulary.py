"""`Vocabulary`: the special tokens of a model, and the tokens that start a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsa.errors import InvalidInput, MissingExtra

_SPECIAL = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")


def is_tokenizer(value: Any) -> bool:
    """Return whether an object has the ids and methods of a tokenizer of transformers."""
    return all(hasattr(value, name) for name in (*_SPECIAL, "encode", "decode"))


@dataclass(eq=False)
class Vocabulary:
    """Ids of a model's special tokens, and its tokenizer, which only sentences need."""

    special_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a tokenizer."""
        if not is_tokenizer(tokenizer):
            raise InvalidInput("tokenizer", got=type(tokenizer).__name__, expected="a tokenizer of transformers")
        ids = {getattr(tokenizer, name, None) for name in _SPECIAL}
        return cls(tuple(sorted(i for i in ids if i is not None)), tokenizer)

    def sentence_starts(self, ids: list[int], lengths: list[int]) -> np.ndarray:
        """Return which tokens start a sentence of the decoded text, `[tokens]`. Special tokens are separate sentences.

        Args:
            ids: Token ids of all sequences, concatenated without padding.
            lengths: Number of tokens per sequence.
        """
        try:
            from sentencex import get_sentence_boundaries  # type: ignore[import-untyped]
        except ImportError:
            raise MissingExtra("sentencex", "text", "splitting text into sentences") from None
        if self.tokenizer is None:
            raise InvalidInput(
                "tokenizer",
                problem="not given",
                expected="the model's tokenizer, which tree='sentences' needs",
                fix="Call convert(model, tokenizer=…)",
            )
        starts = np.zeros(len(ids), bool)
        begin = 0
        for length in lengths:
            pieces = [self._piece(i) for i in ids[begin : begin + length]]
            ends = np.cumsum([len(text) for text in pieces])
            for boundary in get_sentence_boundaries("en", "".join(pieces)):
                # The token with the first character of the sentence that is not a space.
                at = boundary["start_index"] + len(boundary["text"]) - len(boundary["text"].lstrip())
                starts[begin + min(int(np.searchsorted(ends, at, side="right")), length - 1)] = True
            begin += length
        special = np.isin(ids, self.special_ids)
        starts |= special
        starts[1:] |= special[:-1]
        return starts

    def _piece(self, token: int) -> str:
        """Return the text that a token adds when it follows another token."""
        if token in self.special_ids:
            return " "
        if token not in self._texts:
            before = self.tokenizer.encode("a", add_special_tokens=False)[:1]
            whole = self.tokenizer.decode([*before, token], clean_up_tokenization_spaces=False)
            self._texts[token] = whole[len(self.tokenizer.decode(before, clean_up_tokenization_spaces=False)) :]
        return self._texts[token]
