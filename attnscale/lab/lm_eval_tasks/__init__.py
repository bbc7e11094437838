"""Long-context tasks for lm-evaluation-harness whose documents are written here: nothing is downloaded.

README.md beside this file is the guide. `FOLDER` is what `lm_eval --include_path` takes.
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
    """The `TaskManager` that knows our tasks, for documents of these lengths and the model of this `HFLM`.

    Tokenizer and `max_length` are read from `lm`, so that what lm-eval would cut is refused; the record of the policies
    goes along, so that the JSON of the results holds it. `metadata` is what else a task reads: `num_samples`, `seed`,
    `haystack`. `public_tasks` indexes lm-eval's own tasks too, which takes it up to a minute.

    Example: `lm_eval.simple_evaluate(lm, tasks=["attnscale_needle"], task_manager=task_manager(lm, [2048, 4096]))`.
    """
    tasks = need("lm_eval.tasks", "task_manager", "eval")
    tokenizer = getattr(lm.tokenizer, "name_or_path", "")
    if not tokenizer:
        reject("lm", lm, "an HFLM whose tokenizer was loaded from a name or a folder: save it and load it from there")
    read = {
        "tokenizer": tokenizer,
        "max_length": lm.max_length,
        "max_seq_lengths": list(max_seq_lengths),
        # Plain dicts: lm-eval copies them with the types that it finds.
        "attnscale": json.loads(json.dumps(getattr(lm.config, "attnscale", None))),
    }
    return tasks.TaskManager(include_path=str(FOLDER), include_defaults=public_tasks, metadata=read | metadata)
