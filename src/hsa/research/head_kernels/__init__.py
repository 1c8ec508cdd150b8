"""Attention heads as kernels over examples: comparison, weighting and pruning (`hsa heads`)."""
