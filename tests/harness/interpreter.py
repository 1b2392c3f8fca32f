"""Triton's interpreter, without what it does again at every call: tests of kernels then take a third of the time."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def quicken(monkeypatch: Any) -> None:
    """Put the language in place once a launch, and look types up once.

    Each call of a function inside a kernel puts all of the language in place anew, which is there since the launch, and
    takes longer than what most of them compute. No result depends on it.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    put_in_place = interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [one for one in function.__globals__.values() if inspect.ismodule(one) and one in (tl, tl.core)]

    def once(function: Any) -> Any:
        missing = any(tl.core.is_builtin(one.load) for one in languages(function))
        return put_in_place(function) if missing else interpreter._LangPatchScope()

    looked_up, look_up = dict[str, Any](), interpreter._get_np_dtype

    def in_memory(kind: Any) -> Any:
        if kind.scalar.name not in looked_up:
            looked_up[kind.scalar.name] = look_up(kind)
        return looked_up[kind.scalar.name]

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", in_memory)
