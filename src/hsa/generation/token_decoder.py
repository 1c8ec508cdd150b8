"""`TokenDecoder`: decode tokens one at a time into text that can be shown: whole characters, no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from hsa.errors import InvalidInput


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte for each printable character with which byte-level BPE writes bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


class TokenDecoder:
    """Incremental decoder of the tokens of one text.

    Args:
        tokenizer: Byte-level `tokenizers.Tokenizer`.
        stop: Strings that end the text; they are left out.

    >>> from hsa.signals import train_tokenizer
    >>> tokenizer = train_tokenizer(["a cat"], 260)
    >>> decoder = TokenDecoder(tokenizer, stop=["END"])
    >>> [decoder.add(token) for token in tokenizer.encode("é END!").ids]  # the first of two bytes is not shown yet
    ['', 'é', ' ', '', '', '', '']
    >>> decoder.stopped
    True
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidInput("stop", got=repr(text), expected="strings of at least one character")
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that may begin a stop string

    def add(self, token: int) -> str:
        """Add a token and return the text that can be shown now."""
        return self._release(self._utf8.decode(self._bytes(token)))

    def end(self) -> str:
        """Return the text that was held back."""
        text = self._release(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _bytes(self, token: int) -> bytes:
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return name.encode()

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        matches = [(begin + len(stop), begin) for stop in self.stop if (begin := text.find(stop)) >= 0]
        if matches:  # the stop string that is complete first ends the text
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        keep = 0
        for stop in self.stop:
            longest = min(len(stop) - 1, len(text))
            keep = max(keep, next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
