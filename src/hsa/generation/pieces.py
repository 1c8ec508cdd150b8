"""Token ids → text that can be shown at once: whole characters, and nothing that may belong to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from hsa.errors import InvalidInput


def _bytes_of_characters() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _bytes_of_characters()


class Pieces:
    """The text of tokens that come one at a time.

    Args:
        tokenizer: a `tokenizers.Tokenizer` that works on bytes.
        stop: strings that end the text; they are left out.

    >>> from hsa.signals.readers.tokens import train_tokenizer
    >>> tokenizer = train_tokenizer(["a cat"], 260)
    >>> pieces = Pieces(tokenizer, stop=["END"])
    >>> [pieces.add(token) for token in tokenizer.encode("é END!").ids]  # the first of two bytes is not shown yet
    ['', 'é', ' ', '', '', '', '']
    >>> pieces.stopped
    True
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidInput("stop", given=repr(text), expected="strings of a character or more")
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may be the beginning of a stop string

    def add(self, token: int) -> str:
        """What can be shown now."""
        return self._show(self._decoder.decode(self._bytes(token)))

    def end(self) -> str:
        """What was held back."""
        text = self._show(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _bytes(self, token: int) -> bytes:
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return name.encode()

    def _show(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(place + len(stop), place) for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:  # the first to be complete ends the text, whatever tokens it came in
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0
        for stop in self.stop:
            longest = min(len(stop) - 1, len(text))
            keep = max(keep, next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
