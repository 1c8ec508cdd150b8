"""Generation of text: `generate` continues a text with a language model, token by token."""

from typing import TYPE_CHECKING

from hsa.exports import lazy

if TYPE_CHECKING:
    from hsa.generation.generate_text import generate as generate
    from hsa.generation.sampling import Sampling as Sampling
    from hsa.generation.text_stream import TextStream as TextStream

_HOMES = {
    "hsa.generation.generate_text": "generate",
    "hsa.generation.sampling": "Sampling",
    "hsa.generation.text_stream": "TextStream",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)
