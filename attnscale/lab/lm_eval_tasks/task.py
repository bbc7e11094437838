"""Tasks for lm-evaluation-harness: documents of a given length in tokens, and their scoring.

The YAML files refer to `LengthTask` and to `needle`, `multi_needle` or `recall`, which lm-eval calls with the metadata
of the run. lm-eval loads this file by path, not as a module of the package.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from transformers import AutoTokenizer

from attnscale.errors import reject

# Default haystack. It contains no digits, so that every number in a prompt belongs to a fact.
TEXT = """
The harbour was quiet before the boats came in. A baker opened her window and let the cold air into the shop.
Two children counted the steps of the old tower and disagreed. The train to the coast was late again. Nobody
had swept the leaves from the square. A letter lay on the table for three days before anyone read it. The
river rose a little after the rain and fell again. Someone was learning the violin behind a closed door. The
museum had lent its best painting to another town. In the evening the lamps were lit one after the other. The
gardener kept his seeds in tins without labels. A map of the valley hung in the hall, and half of its names
had changed. The clock above the market struck at the wrong hour. They agreed to meet by the bridge and went
home. Snow was expected in the hills. The cook said that the soup needed more time.
"""

SYLLABLES = tuple("".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou"))


class Kind(NamedTuple):
    """Format of the documents of a task."""

    instruction: str
    fact: str
    question: str
    prefix: str  # beginning of the answer, followed by the numbers
    facts: int
    asked: int
    separator: str
    haystack_of_facts: bool


NEEDLE = Kind(
    instruction="Special numbers are hidden in the following text. Remember them.",
    fact="The special number of {word} is {number}.",
    question="What is the special number of {words}?",
    prefix="The special number of {words} is",
    facts=1,
    asked=1,
    separator=" ",
    haystack_of_facts=False,
)
MULTI_NEEDLE = NEEDLE._replace(facts=4)
RECALL = Kind(
    instruction="Remember the number of every word.",
    fact="{word}: {number}",
    question="What are the numbers of {words}?",
    prefix="The numbers of {words} are",
    facts=4,
    asked=4,
    separator="\n",
    haystack_of_facts=True,
)


class Settings(NamedTuple):
    """Checked metadata of a run."""

    tokens: Callable[[str], int]  # number of tokens of a whole prompt, special tokens included
    tokens_within: Callable[[str], int]  # number of tokens of a part of a prompt
    sentences: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int


def needle(**metadata: Any) -> dict[str, datasets.Dataset]:
    """One fact in a text, at depths from beginning to end."""
    return _dataset(NEEDLE, _settings(metadata))


def multi_needle(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Four facts in a text and a question about one."""
    return _dataset(MULTI_NEEDLE, _settings(metadata))


def recall(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Only facts, with a question about four of them: multi-query associative recall."""
    return _dataset(RECALL, _settings(metadata))


def _settings(metadata: dict[str, Any]) -> Settings:
    lengths = metadata.get("max_seq_lengths", (4096,))
    if not isinstance(lengths, (list, tuple)) or not lengths or not all(isinstance(n, int) for n in lengths):
        reject("max_seq_lengths", lengths, "a list of ints, for example [4096, 8192]")
    limit = metadata.get("max_length")
    if not isinstance(limit, int):
        reject("max_length", limit, "the max_length of the model, in --model_args or the metadata")
    if max(lengths) > limit:
        accepted = f"lengths up to the model's max_length={limit}; lm-eval truncates longer prompts"
        reject("max_seq_lengths", lengths, accepted)
    samples = metadata.get("num_samples", 50)
    if not isinstance(samples, int) or samples < 1:
        reject("num_samples", samples, "an int >= 1, the number of documents per length")
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(name, str):
        reject("tokenizer", name, "a name or folder, in --model_args or the metadata")
    tokenizer = AutoTokenizer.from_pretrained(name)
    file = metadata.get("haystack")
    text = TEXT if file is None else Path(file).read_text(encoding="utf-8")
    sentences = tuple(sentence for part in re.split(r"(?<=[.!?])\s+", text) if (sentence := " ".join(part.split())))
    if not sentences:
        reject("haystack", file, "a non-empty text file")
    return Settings(
        tokens=lambda prompt: len(tokenizer(prompt).input_ids),
        tokens_within=functools.lru_cache(4096)(lambda part: len(tokenizer(part, add_special_tokens=False).input_ids)),
        sentences=sentences,
        lengths=tuple(lengths),
        samples=samples,
        seed=metadata.get("seed", 0),
    )


def _dataset(kind: Kind, settings: Settings) -> dict[str, datasets.Dataset]:
    """Return the documents with lengths alternating, so that `limit` takes the same number of each length."""
    documents = [
        _document(kind, settings, length, sample) for sample in range(settings.samples) for length in settings.lengths
    ]
    return {"test": datasets.Dataset.from_list(documents, split=datasets.Split.TEST)}


def _document(kind: Kind, settings: Settings, length: int, sample: int) -> dict[str, Any]:
    """Return a document of at most `length` tokens, answer included, filled with whole sentences."""
    draw = random.Random(f"{settings.seed} {kind} {length} {sample}")
    numbers: dict[str, int] = {}
    while len(numbers) < kind.facts:
        numbers[_word(draw)] = _number(draw)
    asked = draw.sample(list(numbers), kind.asked)
    # The depth of a single asked fact is spread evenly over the samples; all other depths are random.
    even = (sample + 0.5) / settings.samples
    depths = {word: even if [word] == asked else draw.random() for word in numbers}
    facts = {word: kind.fact.format(word=word, number=number) for word, number in numbers.items()}
    words = ", ".join(asked)
    question, prefix = kind.question.format(words=words), kind.prefix.format(words=words)
    target = " " + ", ".join(str(numbers[word]) for word in asked)

    def context(haystack: list[str]) -> str:
        text = list(haystack)
        for word in sorted(facts, key=lambda word: -depths[word]):  # last first, so that earlier indices stay valid
            text.insert(int(depths[word] * (len(haystack) + 1)), facts[word])
        return f"{kind.instruction}\n{kind.separator.join(text)}\n{question}"

    def tokens(haystack: list[str]) -> int:
        return settings.tokens(f"{context(haystack)} {prefix}{target}")

    haystack: list[str] = []
    least = tokens(haystack)
    if least > length:
        reject("max_seq_lengths", length, f"lengths of at least {least} tokens, the size without a haystack")
    spare = length - least
    for sentence in _haystack(kind, settings, draw, numbers):
        spare -= max(1, settings.tokens_within(kind.separator + sentence))
        if spare < 0:
            break
        haystack.append(sentence)
    while (used := tokens(haystack)) > length:  # joined sentences may take more tokens than separate ones
        haystack.pop()
    return {
        "context": context(haystack),
        "prefix": prefix,
        "target": target,
        "depth": sum(depths[word] for word in asked) / len(asked),
        "length": used,
        "max_length": length,
    }


def _haystack(kind: Kind, settings: Settings, draw: random.Random, taken: dict[str, int]) -> Iterator[str]:
    """Yield sentences endlessly: of the text, from a random one on, or facts about other words."""
    if kind.haystack_of_facts:
        while True:
            word = _word(draw)
            if word not in taken:
                yield kind.fact.format(word=word, number=_number(draw))
    start = draw.randrange(len(settings.sentences))
    yield from itertools.islice(itertools.cycle(settings.sentences), start, None)


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(SYLLABLES, k=4))


def _number(draw: random.Random) -> int:
    return draw.randrange(10_000, 100_000)


class LengthTask(ConfigurableTask):
    """Loglikelihood task, teacher-forced in one forward pass, with an additional accuracy per length as in RULER."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def build_all_requests(self, **options: Any) -> None:
        """Check the length of complete prompts, with chat template and system prompt; lm-eval would truncate them."""
        if options.get("cache_requests"):
            reject("cache_requests", True, "False, since the request cache of lm-eval does not distinguish lengths")
        super().build_all_requests(**options)
        metadata = self.config.metadata
        limit = metadata["max_length"]
        tokenizer = AutoTokenizer.from_pretrained(metadata.get("tokenizer") or metadata["pretrained"])
        longest = max(len(tokenizer("".join(request.args)).input_ids) for request in self.instances)
        if longest > limit:
            accepted = f"at least {longest}, the longest prompt with its answer; lm-eval truncates longer prompts"
            reject("max_length", limit, accepted)

    def process_results(self, doc: Mapping[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
        """An answer is correct if each of its tokens is the most likely one."""
        ((loglikelihood, greedy),) = results
        return {"acc": float(greedy), "loglikelihood": loglikelihood, str(doc["max_length"]): float(greedy)}

    def aggregation(self) -> dict[str, Callable[[list[float]], float]]:
        return dict.fromkeys(["acc", "loglikelihood", *self._lengths()], mean)

    def higher_is_better(self) -> dict[str, bool]:
        return dict.fromkeys(["acc", "loglikelihood", *self._lengths()], True)

    def _lengths(self) -> list[str]:
        return [str(length) for length in sorted(set(self.dataset["test"]["max_length"]))]
