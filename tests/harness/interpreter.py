"""A faster Triton interpreter: without redundant work, tests of kernels take a third of the time."""

import dataclasses
import functools
import inspect
from typing import Any


def quicken(monkeypatch: Any) -> None:
    """Patch the language once for each launch, cache type look-ups, and skip sums for a check that is off.

    The interpreter patches the language again at each call of a function inside a kernel, which takes longer than what
    most of them compute. It computes sums of integers a second time in 64 bits to assert their range, although nothing
    is asserted without ``debug``, which is off. No result depends on any of this.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    put_in_place = interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]

    def once(function: Any) -> Any:
        missing = any(tl.core.is_builtin(module.load) for module in languages(function))
        return put_in_place(function) if missing else interpreter._LangPatchScope()

    looked_up, look_up = dict[str, Any](), interpreter._get_np_dtype

    def in_memory(kind: Any) -> Any:
        if kind.scalar.name not in looked_up:
            looked_up[kind.scalar.name] = look_up(kind)
        return looked_up[kind.scalar.name]

    options = interpreter.interpreter_builder.options
    checked = dataclasses.replace(options, sanitize_overflow=options.sanitize_overflow and options.debug)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", checked)
    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", in_memory)
