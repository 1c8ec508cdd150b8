"""Modules: attention and transformer layers used as those of `torch.nn` are, and the hierarchical encoder.

- `MultiscaleAttention`, `HierarchicalAttention`: in place of `torch.nn.MultiheadAttention`.
- `MultiscaleEncoderLayer`, `HierarchicalEncoderLayer`, `MultiscaleDecoderLayer`: in place of PyTorch's transformer layers.
- `HierarchicalEncoder`: embeddings per modality, positions per domain and layers of attention on a tree.
"""

from typing import TYPE_CHECKING

from hsa.exports import lazy

if TYPE_CHECKING:
    from hsa.nn.embedding import Embedding as Embedding
    from hsa.nn.embedding import Modality as Modality
    from hsa.nn.encoder import HierarchicalEncoder as HierarchicalEncoder
    from hsa.nn.encoder_config import EncoderConfig as EncoderConfig
    from hsa.nn.multihead_attention import HierarchicalAttention as HierarchicalAttention
    from hsa.nn.multihead_attention import MultiscaleAttention as MultiscaleAttention
    from hsa.nn.penalties import collecting_penalties as collecting_penalties
    from hsa.nn.transformer_layers import HierarchicalEncoderLayer as HierarchicalEncoderLayer
    from hsa.nn.transformer_layers import MultiscaleDecoderLayer as MultiscaleDecoderLayer
    from hsa.nn.transformer_layers import MultiscaleEncoderLayer as MultiscaleEncoderLayer

_HOMES = {
    "hsa.nn.embedding": "Embedding Modality",
    "hsa.nn.encoder": "HierarchicalEncoder",
    "hsa.nn.encoder_config": "EncoderConfig",
    "hsa.nn.multihead_attention": "HierarchicalAttention MultiscaleAttention",
    "hsa.nn.penalties": "collecting_penalties",
    "hsa.nn.transformer_layers": "HierarchicalEncoderLayer MultiscaleDecoderLayer MultiscaleEncoderLayer",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)
