"""Published document models to compare with, trained, saved and explained like the models of this library.

- `deepsets`: DeepSets, which pools leaves without attention.
- `han`: Hierarchical Attention Networks, with an encoder and attention pooling per level.
- `hat`: Hierarchical Attention Transformers, with layers inside and across segments.
- `transformer_xl`: Transformer-XL, which reads segment by segment with a memory; a classifier and a language model.

Importing this package registers their names; the core does not depend on it. The models load when they are first used.
"""

from typing import TYPE_CHECKING

from hsa.exports import lazy
from hsa.models.registry import ARCHITECTURES, LANGUAGE_ARCHITECTURES, LANGUAGE_MODELS, MODELS, Model
from hsa.registry import KINDS
from hsa.training.options import EXTRA_OPTIONS

if TYPE_CHECKING:
    from hsa.baselines.han.model import HanConfig as HanConfig
    from hsa.baselines.han.model import HanEncoder as HanEncoder
    from hsa.baselines.hat.model import HatConfig as HatConfig
    from hsa.baselines.hat.model import HatEncoder as HatEncoder
    from hsa.baselines.transformer_xl.encoder import TransformerXLConfig as TransformerXLConfig
    from hsa.baselines.transformer_xl.encoder import TransformerXLEncoder as TransformerXLEncoder
    from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig as TransformerXLLanguageConfig
    from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageModel as TransformerXLLanguageModel

_HOMES = {
    "hsa.baselines.han.model": "HanConfig HanEncoder",
    "hsa.baselines.hat.model": "HatConfig HatEncoder",
    "hsa.baselines.transformer_xl.encoder": "TransformerXLConfig TransformerXLEncoder",
    "hsa.baselines.transformer_xl.language_model": "TransformerXLLanguageConfig TransformerXLLanguageModel",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)

# Without attention, there are no heads to fuse.
MODELS.register("deepsets", Model("tree", {"kind": "none", "fusion": "concatenation"}))
KINDS.register("none", "hsa.baselines.deepsets:NONE")

for _name, _home in {
    "han": "hsa.baselines.han.architecture:HAN",
    "hat": "hsa.baselines.hat.architecture:HAT",
    "transformer-xl": "hsa.baselines.transformer_xl.architecture:ENCODER",
}.items():
    MODELS.register(_name, Model(_name, fuses=False))
    ARCHITECTURES.register(_name, _home)

LANGUAGE_MODELS.register("transformer-xl", Model("transformer-xl", fuses=False))
LANGUAGE_ARCHITECTURES.register("transformer-xl", "hsa.baselines.transformer_xl.architecture:LANGUAGE_MODEL")

EXTRA_OPTIONS.register("documents", "hsa.baselines.options:DocumentOptions")
