"""The task class of our YAML files: scores by length, and refuses prompts that the model would get only in part.

lm-eval loads this file by its path, not as a module of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from transformers import AutoTokenizer

from attnscale.errors import reject


class LengthTask(ConfigurableTask):
    """A task by loglikelihood, teacher-forced in one forward, with one more accuracy for each length as in RULER."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def build_all_requests(self, **options: Any) -> None:
        """Check what the model will really get, with chat template and system prompt: lm-eval would cut it."""
        if options.get("cache_requests"):
            reject("cache_requests", True, "False: lm-eval's cache of requests does not tell lengths apart")
        super().build_all_requests(**options)
        metadata = self.config.metadata
        limit = metadata["max_length"]
        tokenizer = AutoTokenizer.from_pretrained(metadata.get("tokenizer") or metadata["pretrained"])
        longest = max(len(tokenizer("".join(request.args)).input_ids) for request in self.instances)
        if longest > limit:
            reject("max_length", limit, f"at least {longest}, the longest prompt with its answer; lm-eval would cut it")

    def process_results(self, doc: Mapping[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
        """Right if every token of the answer is the likeliest one."""
        ((loglikelihood, greedy),) = results
        return {"acc": float(greedy), "loglikelihood": loglikelihood, str(doc["max_length"]): float(greedy)}

    def aggregation(self) -> dict[str, Callable[[list[float]], float]]:
        return dict.fromkeys(["acc", "loglikelihood", *self._lengths()], mean)

    def higher_is_better(self) -> dict[str, bool]:
        return dict.fromkeys(["acc", "loglikelihood", *self._lengths()], True)

    def _lengths(self) -> list[str]:
        return [str(length) for length in sorted(set(self.dataset["test"]["max_length"]))]
