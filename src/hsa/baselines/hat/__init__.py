"""Hierarchical Attention Transformers (Chalkidis et al. 2022)."""
