"""Document models of others, each in a room of its own: DeepSets, HAN, HAT, Transformer-XL.

They are trained, saved, compared and explained like ours because they register here; nothing in the core knows them.
Importing this package imports none of them.
"""

from hsa.models.registry import ARCHITECTURES, LANGUAGE_ARCHITECTURES, LANGUAGE_MODELS, MODELS, Model
from hsa.registry import KINDS
from hsa.training.options import EXTRA_OPTIONS

# Without attention, heads have nothing to talk about and no key to share.
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
