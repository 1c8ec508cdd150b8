"""Attention over trees in pre-trained transformers models, and frozen encoders as embeddings.

`convert` replaces the attention of a model, `revert` restores it, and `counting` counts its operations. `calibrate` searches
for settings that keep to a budget. Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from hsa.exports import lazy

if TYPE_CHECKING:
    from hsa.huggingface.cache import memory_of as memory_of
    from hsa.huggingface.cache import new_cache as new_cache
    from hsa.huggingface.conversion import convert as convert
    from hsa.huggingface.conversion import convert_as as convert_as
    from hsa.huggingface.conversion import revert as revert
    from hsa.huggingface.conversion import settings_of as settings_of
    from hsa.huggingface.decoding import DecodingStep as DecodingStep
    from hsa.huggingface.decoding import decoding_graph as decoding_graph
    from hsa.huggingface.encoders import ImageEncoder as ImageEncoder
    from hsa.huggingface.encoders import TextEncoder as TextEncoder
    from hsa.huggingface.fidelity.calibrate import calibrate as calibrate
    from hsa.huggingface.fidelity.examples import Examples as Examples
    from hsa.huggingface.fidelity.examples import load_examples as load_examples
    from hsa.huggingface.fidelity.judge import Judge as Judge
    from hsa.huggingface.interface import register as register
    from hsa.huggingface.observe import counting as counting
    from hsa.huggingface.settings import LayerSettings as LayerSettings

_HOMES = {
    "hsa.huggingface.cache": "memory_of new_cache",
    "hsa.huggingface.conversion": "convert convert_as revert settings_of",
    "hsa.huggingface.decoding": "DecodingStep decoding_graph",
    "hsa.huggingface.encoders": "ImageEncoder TextEncoder",
    "hsa.huggingface.fidelity.calibrate": "calibrate",
    "hsa.huggingface.fidelity.examples": "Examples load_examples",
    "hsa.huggingface.fidelity.judge": "Judge",
    "hsa.huggingface.interface": "register",
    "hsa.huggingface.observe": "counting",
    "hsa.huggingface.settings": "LayerSettings",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)
