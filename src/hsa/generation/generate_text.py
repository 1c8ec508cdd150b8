"""`generate`: continue a text with a language model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from hsa.errors import InvalidInput
from hsa.generation.sampling import Sampling
from hsa.generation.text_stream import TextStream, Writer
from hsa.generation.token_decoder import TokenDecoder
from hsa.signals.readers.text import normalize_newlines
from hsa.signals.readers.tokens import encodable

END = "<|end|>"


def generate(
    model: Writer,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ends: Collection[int] | None = None,
    special_tokens: bool = False,
) -> TextStream:
    """Continue a text with a language model.

    Args:
        model: Language model in `eval` mode.
        tokenizer: Tokenizer of the model, a byte-level `tokenizers.Tokenizer`.
        prompt: Text to continue; it is not repeated.
        max_new_tokens: Maximum number of tokens to generate. The end of a document ends the text too.
        sampling: Options for drawing tokens; by default they are drawn from the model's own distribution.
        stop: Strings that end the text; they are left out.
        ends: Ids of tokens that end a document; `<|end|>` by default.
        special_tokens: Whether the tokenizer adds its special tokens to the prompt.

    Returns:
        An iterator over the new text, in pieces of whole characters.

    Raises:
        InvalidInput: For an empty or overlong prompt, or the tokenizer of another model; while iterating, for logits that
            are not finite.

    >>> from hsa.models import LanguageModel, LanguageModelConfig
    >>> from hsa.signals import train_tokenizer
    >>> tokenizer = train_tokenizer(["a cat"], 260)
    >>> config = LanguageModelConfig(tokenizer.get_vocab_size(), width=8, heads=2, layers=1)
    >>> stream = generate(LanguageModel(config).eval(), tokenizer, "a c", max_new_tokens=5)
    >>> text = "".join(stream)
    >>> len(stream.ids), stream.reason
    (5, 'tokens')
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InvalidInput("max_new_tokens", got=max_new_tokens, expected="1 or more")
    if not isinstance(prompt, str):
        raise InvalidInput("prompt", got=f"a value of type {type(prompt).__name__}", expected="a text to continue")
    if not prompt:
        raise InvalidInput("prompt", got="an empty text", expected="at least one character to continue from")
    size = tokenizer.get_vocab_size()
    if size != model.config.vocabulary:
        raise InvalidInput(
            "tokenizer", got=f"{size:,} tokens", expected=f"{model.config.vocabulary:,}, the vocabulary of the model"
        )
    ids: list[int] = tokenizer.encode(encodable(normalize_newlines(prompt)), add_special_tokens=special_tokens).ids
    most = model.config.max_length
    if most is not None and len(ids) > most:
        raise InvalidInput(
            "prompt",
            got=f"{len(ids):,} tokens",
            expected=f"at most {most:,}, the max_length of the model",
            fix="Shorten the prompt",
        )
    ends = {tokenizer.token_to_id(END)} if ends is None else set(ends)
    return TextStream(model, ids, TokenDecoder(tokenizer, stop), sampling or Sampling(), max_new_tokens, ends)
