"""All module-level mutable state of the package; `tests/util/test_state.py` fails if there is any elsewhere.

Each line is used by the modules named in its comment, and by no other.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from attnscale._util.memory import Memory

SCRATCH = threading.local()  # _util.scratch: a few buffers a thread
SAMPLED_ROWS: Memory[Any] = Memory(most=64)  # statistics.request: which rows a request samples
BETAS: Memory[Any] = Memory(most=64)  # policies.temperature: β of policies that are formulas
COUNT_NUMBERS = itertools.count()  # policies.temperature: names of counts that cannot change
ESTIMATE_NUMBERS = itertools.count(1)  # policies.adaptive: estimates in the order of their first reduction
REGISTERED_POLICIES: dict[str, type] = {}  # policies.build: classes added by `register_policy`
TORCH_REPLACED: list[Callable[..., Any]] = []  # backends.sdpa, patch_torch: torch's attention beneath patches
CLOSED_FUSED_PATHS: list[Any] = []  # patch_torch: patches that keep torch from its fused encoder
TAPS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # call.tap: by number
TAP_NUMBERS = itertools.count(1)  # call.tap
MODEL_PACKAGES: dict[str, str] = {}  # __init__, diagnostics.monitor: module of a base class → our package for it
FINDERS: dict[Callable[..., Any], Any] = {}  # diagnostics.monitor: how attention modules are found, and opened
FILE_NUMBERS = itertools.count()  # diagnostics.sinks.tensorboard: tells files of one second apart
HF_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()  # hf.sites: sites that override the implementation "sdpa"
HF_COUNTED_MASKS = threading.local()  # hf.sites: n of the last few masks, per thread
HF_TOKEN_SHARDS = threading.local()  # hf.sites: who holds which tokens, of the last position_ids
HF_KNOWN_CAUSALITY: dict[type, bool] = {}  # hf.attach: which model classes say whether they are causal
HF_READ_LATER: ContextVar[bool] = ContextVar("read_later", default=False)  # hf.checkpoint, hf.persistence: in `load`
HF_SAVED_RECORD: ContextVar[Any] = ContextVar("saved_record", default=None)  # hf.persistence: policies being saved
HF_RESUMED_TRAINER: ContextVar[Any] = ContextVar("resumed_trainer", default=None)  # hf.persistence: before resuming
TRITON_OUTCOMES: dict[tuple[torch.device, torch.dtype], Any] = {}  # backends.trust: what checks of the kernels found
TRITON_CHECKING = threading.Lock()  # backends.trust: held while the kernels are checked
