"""Sparse attention on a CPU: dense products over gathered tiles."""
