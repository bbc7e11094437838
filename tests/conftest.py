"""Shared set-up."""

import torch

# Two workers share two cores: threads that wait for each other cost more than they gain.
torch.set_num_threads(1)
