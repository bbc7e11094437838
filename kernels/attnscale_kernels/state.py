"""All module-level mutable state of this package; `tests/util/test_state.py` fails if there is any elsewhere."""

from __future__ import annotations

from typing import Any

LAUNCHES: dict[Any, Any] = {}  # launch_cache: signature of a call or of a launch → its plan or compiled kernel
