"""All module-level mutable state of this package; `tests/util/test_state.py` fails if there is any elsewhere."""

from __future__ import annotations

from typing import Any

COMPILED: dict[Any, Any] = {}  # compiled: kernels that triton has compiled, by what it compiled them for
PLANS: dict[Any, Any] = {}  # plans: what calls of a signature are launched with, at most MOST_PLANS
