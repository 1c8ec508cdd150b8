"""Hierarchical Attention Networks (Yang et al. 2016)."""
