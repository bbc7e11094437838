"""Shared set-up."""

import os
from importlib.util import find_spec

# Kernels run in Triton's interpreter, which must be selected before triton is imported. Tests that compile kernels
# start a separate process.
os.environ["TRITON_INTERPRET"] = "1"

import torch

if find_spec("triton"):  # available on Linux only
    from quick_interpreter import install

    install()

# Test workers share few cores: more threads would only compete.
torch.set_num_threads(1)
