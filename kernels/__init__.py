"""Attention over a sparse pattern."""
