"""What a run will cost and whether it would start, before it is started: `longstride plan`, `new`, `train --dry-run`.

`costs` has what is counted: parameters, operations, memory. It imports torch, and is not imported with the verb.
`dry_run` imports deepspeed; it is handed out as a module, and imported by none before it is wanted.
"""
