"""Mixers that read memories: rows that summarise others, or that come from the contexts before."""
