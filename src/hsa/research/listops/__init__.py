"""Nested list operations (ListOps): generator, built-in example of `hsa train`, and additions to its report."""
