"""`longstride export`: write a checkpoint as safetensors, a configuration and a model card.

No other package imports from here; models and hub read the result.
"""
