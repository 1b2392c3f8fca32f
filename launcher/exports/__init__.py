"""`longstride export`: a checkpoint as safetensors, a configuration and a model card.

No other room imports from here; models and hub read what it writes.
"""
