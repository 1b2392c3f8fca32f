"""The one error family of the data room."""


class DataError(ValueError):
    """A folder, shard or state that cannot be used: one line with the path, the value, the rule and what to do."""
