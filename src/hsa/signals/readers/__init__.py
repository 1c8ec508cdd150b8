"""Readers: what people have → `Signal`."""

from hsa.signals.readers.nested import from_nested
from hsa.signals.readers.text import read_text, read_text_file, train_tokenizer

__all__ = ["from_nested", "read_text", "read_text_file", "train_tokenizer"]
