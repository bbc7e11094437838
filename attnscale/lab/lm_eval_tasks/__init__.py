"""Long-context tasks for lm-evaluation-harness with generated documents: nothing is downloaded.

Usage: README.md in this folder. `FOLDER` is the argument of `lm_eval --include_path`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscale._util.optional import need
from attnscale.errors import reject

FOLDER = Path(__file__).parent


def task_manager(lm: Any, max_seq_lengths: Sequence[int], *, public_tasks: bool = False, **metadata: Any) -> Any:
    """Return a `TaskManager` with the attnscale tasks.

    Tokenizer and `max_length` come from `lm`, so that documents longer than `max_length` raise instead of being
    truncated. The record of the model's policies is added to the metadata and thus to the results JSON.

    Args:
        lm: the `HFLM` to evaluate.
        max_seq_lengths: document lengths in tokens.
        public_tasks: also index the tasks of lm-eval, which takes up to a minute.
        **metadata: other options of the tasks: `num_samples`, `seed`, `haystack`.

    Returns:
        An `lm_eval.tasks.TaskManager`.

    Raises:
        ArgumentError: the tokenizer of `lm` has no name or folder.
        MissingDependencyError: lm-eval is not installed.

    Example:
        >>> tasks = task_manager(lm, [2048, 4096])  # doctest: +SKIP
        >>> lm_eval.simple_evaluate(lm, tasks=["attnscale_needle"], task_manager=tasks)  # doctest: +SKIP
    """
    tasks = need("lm_eval.tasks", "task_manager", "eval")
    tokenizer = getattr(lm.tokenizer, "name_or_path", "")
    if not tokenizer:
        reject("lm", lm, "an HFLM whose tokenizer has a name or folder; save the tokenizer and load it from there")
    read = {
        "tokenizer": tokenizer,
        "max_length": lm.max_length,
        "max_seq_lengths": list(max_seq_lengths),
        # Plain dicts: lm-eval copies mappings with their own type.
        "attnscale": json.loads(json.dumps(getattr(lm.config, "attnscale", None))),
    }
    return tasks.TaskManager(include_path=str(FOLDER), include_defaults=public_tasks, metadata=read | metadata)
