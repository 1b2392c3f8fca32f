"""What every rank imports for seconds: imported here before ranks of tests are forked."""

# ruff: noqa: F401

import deepspeed.runtime.zero.muon.muon_optimizer  # with torch's compiler: most of a start
import torch._dynamo

import launcher.batches
import launcher.checkpoint
import launcher.engine
import launcher.loop
import launcher.resume
import launcher.train
