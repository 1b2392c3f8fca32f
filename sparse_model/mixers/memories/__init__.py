"""Attention that reads memories: rows of the contexts before."""
