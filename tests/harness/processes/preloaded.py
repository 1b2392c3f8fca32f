"""Slow imports of every rank, done once before ranks of tests are forked."""

# ruff: noqa: F401

import gc
import weakref

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # with torch's compiler: most of a start
import torch._dynamo
import torch.utils.serialization

import longstride.launcher.checkpoints.checkpoint
import longstride.launcher.data.run
import longstride.launcher.engine.build
import longstride.launcher.train
import longstride.launcher.training.loop
import longstride.launcher.training.resume


def share_pages() -> None:
    """Leave the memory of what is imported to all processes that are forked from here on: few pages are copied."""
    gc.collect()
    gc.freeze()  # else a process copies each page that its garbage collector looks at: half of a short run's time
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
