"""What a run will cost, before it is started: `longstride plan`.

`costs` has what is counted: parameters, operations, memory. It imports torch, and is not imported with the verb.
"""
