"""Studies beside the core. Importing this package registers their names; their modules load when a name is first used."""

from hsa.registry import FUSIONS

FUSIONS.register("talking", "hsa.research.head_fusion:TalkingHeads")
FUSIONS.register("collaborative", "hsa.research.head_fusion:CollaborativeHeads")
FUSIONS.register("over-heads", "hsa.research.head_fusion:AttentionOverHeads")
