"""All module-level mutable state of this package. `tests/util/test_state.py` fails if other modules hold any."""

from __future__ import annotations

from typing import Any

LAUNCHES: dict[Any, Any] = {}  # launch_cache: signature of a call or launch → its plan or compiled kernel
