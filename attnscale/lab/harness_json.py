"""The results of an evaluation in the JSON conventions of lm-evaluation-harness: one file for each policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnscale import __version__
from attnscale._util.files import write_whole

METRICS = {"accuracy": "acc", "bits_per_byte": "bits_per_byte", "nats_per_token": "nats_per_token"}
HIGHER_IS_BETTER = {"acc": True, "bits_per_byte": False, "nats_per_token": False}
INTERVAL = 2 * 1.96  # standard errors in an interval of 95 %


def write_harness_json(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `lm_eval/results_POLICY.json` from the rows of results.csv, a task for each length.

    A metric is "acc,none", its standard error "acc_stderr,none", as where no filter is applied. Of several models it
    is the mean.
    """
    whole = [row for row in rows if not row["bin"]]
    pooled = [row for row in whole if row["model"] == "all"] or whole
    for policy in dict.fromkeys(row["policy"] for row in pooled):
        results: dict[str, dict[str, Any]] = {}
        samples: dict[str, dict[str, int]] = {}
        higher: dict[str, dict[str, bool]] = {}
        for row in (row for row in pooled if row["policy"] == policy):
            task, metric = f"{row['task']}_{row['length']}", METRICS[row["metric"]]
            entry = results.setdefault(task, {"alias": task})
            entry[f"{metric},none"] = row["value"]
            entry[f"{metric}_stderr,none"] = (row["high"] - row["low"]) / INTERVAL
            higher.setdefault(task, {})[metric] = HIGHER_IS_BETTER[metric]
            samples[task] = {"original": row["samples"], "effective": row["samples"]}
        content = {
            "results": results,
            "n-samples": samples,
            "versions": dict.fromkeys(results, __version__),
            "higher_is_better": higher,
            "config": {"model": "hf", "model_args": {"attnscale_policy": policy}},
        }
        target = folder / "lm_eval" / f"results_{re.sub(r'[^A-Za-z0-9_.=-]', '_', policy)}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, json.dumps(content, indent=2) + "\n")
