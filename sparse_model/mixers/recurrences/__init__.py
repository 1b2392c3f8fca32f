"""Mixers with a state of fixed size in place of keys and values: recurrences over positions."""
