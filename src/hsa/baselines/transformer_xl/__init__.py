"""Transformer-XL (Dai et al. 2019)."""
