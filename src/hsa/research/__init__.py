"""Studies beside the core. Importing this package registers their names; their modules load when a name is first used."""

from hsa.models.registry import MODELS, Model
from hsa.registry import FUSIONS, KINDS
from hsa.training.options import EXTRA_OPTIONS
from hsa.training.tasks import TASKS

FUSIONS.register("talking", "hsa.research.head_fusion:TalkingHeads")
FUSIONS.register("collaborative", "hsa.research.head_fusion:CollaborativeHeads")
FUSIONS.register("over-heads", "hsa.research.head_fusion:AttentionOverHeads")

KINDS.register("trilinear", "hsa.research.trilinear.module:TRILINEAR")
KINDS.register("hierarchical-trilinear", "hsa.research.trilinear.module:HIERARCHICAL_TRILINEAR")
for _kind in ("trilinear", "hierarchical-trilinear"):  # pairs have no one key that heads could share or talk about
    MODELS.register(_kind, Model("tree", {"kind": _kind, "position_input": True, "fusion": "concatenation"}))

TASKS.register("match3", "hsa.research.match3.task:MATCH3")
EXTRA_OPTIONS.register("match3", "hsa.research.match3.options:Match3Options")
