"""Triton kernels of three-way attention."""
