"""The transformers model types that `attnscale.hf.apply` accepts, as a table: `python -m scripts.docs.model_types`.

For each type that writes or reads text, or writes down speech, a model is built from its default config without
storage, and `attnscale.hf.inspect` decides. No weights are loaded and nothing is computed. The command takes half a
minute and writes `model_types.csv`; the site and a test read that file.
"""

from __future__ import annotations

import csv
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scripts.docs.sources import ROOT

TABLE = Path(__file__).with_name("model_types.csv")

# The auto classes, the most telling first: a type is inspected as the first that can be built.
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC")

# Verdict → its explanation on the page, in the order of the page.
VERDICTS = {
    "supported": "`attnscale.hf.apply(model, policy)` works with its default arguments.",
    "some layers": "Some attention modules are supported, others are not. Select the supported ones with `layers=...`; "
    "`attnscale.hf.inspect(model)` lists them.",
    "scales already": "The default config scales logits by length or position. `apply` raises an error unless "
    "`on_existing` is `'compose'` (β multiplies the existing factor) or `'replace'` (β replaces it).",
    "own attention": "Refused. The model computes attention in its own code and does not dispatch through "
    "transformers' `AttentionInterface`, so a policy cannot reach it.",
    "selects keys": "Refused. An indexer or compressor selects the keys of each query. With a policy these layers "
    "would silently attend to all keys.",
    "no attention": "Refused. The model of the default config has no softmax attention: state-space, recurrent and "
    "Fourier models. Hybrid models appear here if their default config has no attention layer.",
    "not inspected": "The default config does not describe a complete model, or a package is missing. Call "
    "`attnscale.hf.inspect(model)` on a loaded model.",
}


class Row(NamedTuple):
    """A model type: the class that was inspected, the verdict, its attention modules, and whether tests cover it."""

    model_type: str
    model_class: str
    verdict: str
    modules: int
    tested: bool


def read_table(path: Path = TABLE) -> list[Row]:
    """The committed table, without the line that names the version of transformers."""
    with path.open(encoding="utf-8", newline="") as file:
        next(file)
        return [
            Row(row["model_type"], row["model_class"], row["verdict"], int(row["modules"]), row["tested"] == "yes")
            for row in csv.DictReader(file)
        ]


def version(path: Path = TABLE) -> str:
    """The version of transformers that the table describes."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# transformers ").strip()


def classes() -> dict[str, list[str]]:
    """The classes of each model type, those of the first task first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for task in TASKS:
        for name, model_class in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(name, []).extend([model_class] if isinstance(model_class, str) else model_class)
    return dict(sorted(found.items()))


def inspect_type(name: str) -> Row:
    """Build a model of this type without storage, and judge it."""
    model, model_class = _build(name)
    if model is None:
        return Row(name, model_class, "not inspected", 0, name in _zoo())
    verdict, modules = _judge(model)
    return Row(name, model_class, verdict, modules, name in _zoo())


def _judge(model: Any) -> tuple[str, int]:
    import attnscale.hf
    from attnscale.hf.existing import find_existing

    found = attnscale.hf.inspect(model, "log", reference_length=8192, floor=True)
    chosen = [layer.facts for layer in found.layers if layer.verdict != "left alone"]
    usable = [facts for facts in chosen if facts.routed and not facts.sparse]
    if found.accepted:
        return "supported", len(found.layers)
    if not chosen:
        return "no attention", len(found.layers)
    if not usable:
        return "selects keys" if any(facts.routed for facts in chosen) else "own attention", len(found.layers)
    scaled = any(find_existing(model, facts) for facts in usable)
    return "scales already" if scaled and len(usable) == len(chosen) else "some layers", len(found.layers)


def _build(name: str) -> tuple[Any, str]:
    """A model on the meta device, from the default config or that of the tests; None if neither can be built."""
    import torch
    import transformers

    candidates = classes()[name]
    for settings in ({}, _zoo().get(name)):
        for model_class in candidates if settings is not None else ():
            try:
                config = transformers.AutoConfig.for_model(name, **(settings or {}))
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return getattr(transformers, model_class)._from_config(config), model_class
            except Exception:  # a config without a size that it needs, a package that is missing: try the next
                continue
    return None, candidates[0]


@cache
def _zoo() -> dict[str, dict[str, Any]]:
    """The model types of the tests and their settings."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    hf_zoo: Any = importlib.import_module("hf_zoo")

    return {name: dict(species.settings) for name, species in hf_zoo.ZOO.items()}


def section() -> tuple[str, dict[str, str]]:
    """The tables of the page, one for each verdict."""
    rows = read_table()
    counts = Counter(row.verdict for row in rows)
    lines = [f"transformers {version()}, {len(rows)} model types:", ""]
    lines += ["| verdict | model types | meaning |", "|---|---|---|"]
    for verdict, text in VERDICTS.items():
        lines.append(f"| [{verdict}](#{verdict.replace(' ', '-')}) | {counts[verdict]} | {text} |")
    for verdict, text in VERDICTS.items():
        lines += ["", f"## {verdict.capitalize()}", "", text, "", *_types(rows, verdict)]
    return "\n".join(lines), {}


def _types(rows: list[Row], verdict: str) -> Iterator[str]:
    chosen = [row for row in rows if row.verdict == verdict]
    tested = [f"`{row.model_type}`" for row in chosen if row.tested]
    if tested:
        yield f"**Covered by tests**: {', '.join(tested)}."
        yield ""
    yield "| model type | class | attention modules |"
    yield "|---|---|---|"
    for row in chosen:
        yield f"| `{row.model_type}` | `{row.model_class}` | {row.modules or '–'} |"


def main() -> None:
    """Inspect every type and write the table."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    names = classes()
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# transformers {transformers.__version__}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for place, name in enumerate(names):
            row = inspect_type(name)
            writer.writerow([*row[:4], "yes" if row.tested else "no"])
            print(f"\r{place + 1}/{len(names)} {name:40s}", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
