"""Studies beside the core: optional features that the core does not import.

- `bidaf`: attention between a context and a question in both directions (BiDAF).
- `collaborative`: trained heads refitted to share their query and key projections.
- `decomposition`: CP decomposition of three-way tensors.
- `head_fusion`: learned alternatives to concatenating heads.
- `head_kernels`: comparison, weighting and pruning of heads, seen as kernels over examples (`hsa heads`).
- `listops`: nested list operations (ListOps): generator, and the default example of `hsa train`.
- `match3`: a task that needs triples of tokens.
- `trilinear`: attention of a query to pairs of keys.

Importing this package registers their models, fusions and tasks; everything loads when it is first used.
"""

from typing import TYPE_CHECKING

from hsa.exports import lazy
from hsa.models.registry import MODELS, Model
from hsa.registry import FUSIONS, KINDS
from hsa.training.options import EXTRA_OPTIONS
from hsa.training.tasks import EXAMPLES, TASKS

if TYPE_CHECKING:
    from hsa.research.bidaf import AttentionFlow as AttentionFlow
    from hsa.research.collaborative import collaborate as collaborate
    from hsa.research.collaborative import prepare_collaborative as prepare_collaborative
    from hsa.research.decomposition import CP as CP
    from hsa.research.decomposition import decompose as decompose
    from hsa.research.head_fusion import AttentionOverHeads as AttentionOverHeads
    from hsa.research.head_fusion import CollaborativeHeads as CollaborativeHeads
    from hsa.research.head_fusion import TalkingHeads as TalkingHeads
    from hsa.research.head_kernels.gram import alignment_matrix as alignment_matrix
    from hsa.research.head_kernels.gram import effective_number as effective_number
    from hsa.research.head_kernels.gram import redundancy as redundancy
    from hsa.research.head_kernels.heads import EncoderHeads as EncoderHeads
    from hsa.research.head_kernels.heads import collect as collect
    from hsa.research.head_kernels.huggingface import TransformerHeads as TransformerHeads
    from hsa.research.head_kernels.learning import compare_sums as compare_sums
    from hsa.research.head_kernels.learning import fit_gating as fit_gating
    from hsa.research.head_kernels.learning import flat_mkl as flat_mkl
    from hsa.research.match3.data import three_match as three_match
    from hsa.research.trilinear.module import Trilinear as Trilinear
    from hsa.research.trilinear.operator import hierarchical_trilinear_attention as hierarchical_trilinear_attention
    from hsa.research.trilinear.operator import trilinear_attention as trilinear_attention

_HOMES = {
    "hsa.research.bidaf": "AttentionFlow",
    "hsa.research.collaborative": "collaborate prepare_collaborative",
    "hsa.research.decomposition": "CP decompose",
    "hsa.research.head_fusion": "AttentionOverHeads CollaborativeHeads TalkingHeads",
    "hsa.research.head_kernels.gram": "alignment_matrix effective_number redundancy",
    "hsa.research.head_kernels.heads": "EncoderHeads collect",
    "hsa.research.head_kernels.huggingface": "TransformerHeads",
    "hsa.research.head_kernels.learning": "compare_sums fit_gating flat_mkl",
    "hsa.research.match3.data": "three_match",
    "hsa.research.trilinear.module": "Trilinear",
    "hsa.research.trilinear.operator": "hierarchical_trilinear_attention trilinear_attention",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)

FUSIONS.register("talking", "hsa.research.head_fusion:TalkingHeads")
FUSIONS.register("collaborative", "hsa.research.head_fusion:CollaborativeHeads")
FUSIONS.register("over-heads", "hsa.research.head_fusion:AttentionOverHeads")

KINDS.register("trilinear", "hsa.research.trilinear.module:TRILINEAR")
KINDS.register("hierarchical-trilinear", "hsa.research.trilinear.module:HIERARCHICAL_TRILINEAR")
for _kind in ("trilinear", "hierarchical-trilinear"):  # fusions act on single keys; these kinds attend to pairs
    MODELS.register(_kind, Model("tree", {"kind": _kind, "position_input": True, "fusion": "concatenation"}))

TASKS.register("match3", "hsa.research.match3.task:MATCH3")
EXTRA_OPTIONS.register("match3", "hsa.research.match3.options:Match3Options")
EXAMPLES.register("listops", "hsa.research.listops.example:LISTOPS")
