"""Shared set-up."""

import os
from importlib.util import find_spec

# There is no GPU here: kernels run in triton's interpreter, which must be chosen before triton is first imported. What
# compiles kernels does so in a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

import torch

if find_spec("triton"):  # it exists on Linux only
    from quick_interpreter import install

    install()

# Two workers share two cores: threads that wait for each other cost more than they gain.
torch.set_num_threads(1)
