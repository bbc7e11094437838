"""All module-level mutable state of the package. `tests/util/test_state.py` fails if other modules hold any.

Each entry is used only by the modules named in its comment.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from attnscale._util.memory import Memory, Scratch

SCRATCH = Scratch()  # backends.sdpa, statistics.rows.tiles: a few CPU buffers per thread
SAMPLED_ROWS: Memory[Any] = Memory(most=64)  # statistics.request: sampled rows of a request
BETAS: Memory[Any] = Memory(most=64)  # policies.temperature: β of formula policies
COUNT_NUMBERS = itertools.count()  # policies.temperature: ids of immutable counts
ESTIMATE_NUMBERS = itertools.count(1)  # policies.adaptive: ids of estimates, in the order of their first reduction
REGISTERED_POLICIES: dict[str, type] = {}  # policies.build: classes added by `register_policy`
TORCH_REPLACED: list[Callable[..., Any]] = []  # call.torch_arguments, patch_torch: torch's attention beneath patches
CLOSED_FUSED_PATHS: list[Any] = []  # patch_torch: patches that disable torch's fused encoder
TAPS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # call.tap: taps by number
TAP_NUMBERS = itertools.count(1)  # call.tap
MODULE_CALLS = threading.local()  # call.tap: running forward passes of monitored modules, per thread
MODEL_PACKAGES: dict[str, str] = {}  # __init__, diagnostics.monitor: module of a base class → our package for it
FINDERS: dict[Callable[..., Any], Any] = {}  # diagnostics.monitor: functions that find and open attention modules
MEETINGS: Counter[str] = Counter()  # diagnostics.records.tally: reports that all processes of a group have joined
FILE_NUMBERS = itertools.count()  # diagnostics.sinks.tensorboard: distinguishes files of one second
HF_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()  # hf.sites: sites that override the implementation "sdpa"
HF_COUNTED_MASKS = threading.local()  # hf.sites: n of the last few masks, per thread
HF_TOKEN_SHARDS = threading.local()  # hf.sites: token shards of the last position_ids
HF_KNOWN_CAUSALITY: dict[type, bool] = {}  # hf.attach: model class → whether it declares its causality
HF_READ_LATER: ContextVar[bool] = ContextVar("read_later", default=False)  # hf.checkpoint, hf.persistence: in `load`
HF_SAVED_RECORD: ContextVar[Any] = ContextVar("saved_record", default=None)  # hf.persistence: policies being saved
HF_RESUMED_TRAINER: ContextVar[Any] = ContextVar("resumed_trainer", default=None)  # hf.persistence: before resuming
TRITON_OUTCOMES: dict[tuple[torch.device, torch.dtype], Any] = {}  # backends.trust: results of kernel checks
TRITON_CHECKING = threading.Lock()  # backends.trust: held during a kernel check
