"""Attention of a query to pairs of keys, over all pairs or along a tree."""
