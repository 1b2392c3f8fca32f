"""Slow imports of every rank, done once before ranks of tests are forked."""

# ruff: noqa: F401

import deepspeed.runtime.zero.muon.muon_optimizer  # with torch's compiler: most of a start
import torch._dynamo

import longstride.launcher.checkpoints.checkpoint
import longstride.launcher.data.run
import longstride.launcher.engine.build
import longstride.launcher.train
import longstride.launcher.training.loop
import longstride.launcher.training.resume
