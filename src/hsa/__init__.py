"""hsa: hierarchical self-attention for PyTorch."""

from hsa.attention.arguments import checking
from hsa.attention.dense import dense_weights
from hsa.attention.hierarchical.operator import energy, hierarchical_attention
from hsa.attention.multiscale.choice import open_families
from hsa.attention.multiscale.find_keys import find_key_order
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.queries import Queries
from hsa.errors import HsaError
from hsa.hierarchy import Hierarchy
