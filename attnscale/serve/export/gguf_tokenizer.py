"""The tokenizer in a GGUF file: converted from the tokenizer.json of a checkpoint, or copied from another GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnscale._util.optional import need
from attnscale.errors import ArgumentError, reject
from attnscale.hf.checkpoint import StoredFiles

_PREFIX = "tokenizer."
_TOKENS = "tokenizer.ggml.tokens"

# Types of tokens in GGUF.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ADVICE = "give a GGUF file of the base model that llama.cpp converted, with --tokenizer FILE"


class Tokenizer(NamedTuple):
    """Keys and values of a tokenizer in GGUF, with the value type of each key, and of lists that of their items."""

    values: Mapping[str, tuple[Any, Any, Any]]

    def write(self, writer: Any) -> None:
        """Add the values to a GGUFWriter."""
        for key, (value, kind, item) in self.values.items():
            writer.add_key_value(key, value, kind, sub_type=item)


def copied_tokenizer(file: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a GGUF file.

    Raises:
        ArgumentError: the file is not a GGUF file with a tokenizer of this vocabulary.
    """
    gguf = need("gguf", "attnscale export --to gguf", "export")
    try:
        fields = gguf.GGUFReader(file).fields
    except (OSError, ValueError) as error:
        reject("tokenizer", str(file), f"a GGUF file ({str(error) or type(error).__name__})")
    values = {}
    for key, field in fields.items():
        if key.startswith(_PREFIX):
            kind, item = field.types[0], field.types[1] if len(field.types) > 1 else None
            values[key] = (field.contents(), kind, item)
    tokens = len(values[_TOKENS][0]) if _TOKENS in values else 0
    if tokens != vocab_size:
        reject("tokenizer", str(file), f"a tokenizer of {vocab_size} tokens, as in the model; this one has {tokens}")
    return Tokenizer(values)


def converted_tokenizer(files: StoredFiles, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a checkpoint, if it is a byte-level BPE that llama.cpp has a name for.

    Raises:
        ArgumentError: there is no tokenizer.json, or llama.cpp would split text differently.
    """
    content = files.json("tokenizer.json")
    if content is None:
        raise ArgumentError(f"path={files.path!r} is not accepted by --to gguf: it has no tokenizer.json; {_ADVICE}")
    model, config = content["model"], files.json("tokenizer_config.json") or {}
    splitter = _splitter(content)
    if model.get("type") != "BPE" or model.get("byte_fallback") or splitter is None or not model.get("merges"):
        shown = {"model": model.get("type"), "byte_fallback": bool(model.get("byte_fallback"))}
        shown |= {"normalizer": content.get("normalizer"), "pre_tokenizer": content.get("pre_tokenizer")}
        raise ArgumentError(
            f"the tokenizer {json.dumps(shown)[:300]} is not accepted by --to gguf: expected a byte-level BPE with "
            f"merges that splits text as gpt-2, smollm or llama-bpe do; {_ADVICE}"
        )
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    tokens = {index: text for text, index in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    if max(tokens) >= vocab_size:
        raise ArgumentError(f"tokenizer.json has the token {max(tokens)}, but the model only {vocab_size} tokens")
    kinds = [_kind(index, tokens, added) for index in range(vocab_size)]
    gguf = need("gguf", "attnscale export --to gguf", "export")
    types = gguf.GGUFValueType
    values: dict[str, tuple[Any, Any, Any]] = {
        "tokenizer.ggml.model": ("gpt2", types.STRING, None),
        "tokenizer.ggml.pre": (splitter, types.STRING, None),
        _TOKENS: ([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)], types.ARRAY, types.STRING),
        "tokenizer.ggml.token_type": (kinds, types.ARRAY, types.INT32),
        "tokenizer.ggml.merges": ([_merge(entry) for entry in model["merges"]], types.ARRAY, types.STRING),
    }
    numbers = {text: index for index, text in tokens.items()}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        named = config.get(f"{role}_token")
        text = named.get("content") if isinstance(named, Mapping) else named
        if text in numbers:
            values[f"tokenizer.ggml.{key}_token_id"] = (numbers[text], types.UINT32, None)
    values["tokenizer.ggml.add_bos_token"] = (_adds_bos(content, config), types.BOOL, None)
    template = files.file("chat_template.jinja")
    chat = config.get("chat_template") if template is None else template.read_text(encoding="utf-8")
    if isinstance(chat, str):
        values["tokenizer.chat_template"] = (chat, types.STRING, None)
    return Tokenizer(values)


def _splitter(content: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name for the pre-tokenizer of a tokenizer.json; None if it has none."""
    if content.get("normalizer") is not None:
        return None
    first = content.get("pre_tokenizer") or {}
    steps: Sequence[Mapping[str, Any]] = first["pretokenizers"] if first.get("type") == "Sequence" else [first]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    whole_words = bool(content["model"].get("ignore_merges"))  # which llama.cpp ties to the name
    plain = steps[-1].get("use_regex", True) and not whole_words
    if len(steps) == 1:
        return "gpt-2" if plain else None
    if len(steps) == 2 and steps[0].get("type") == "Digits" and steps[0].get("individual_digits") and plain:
        return "smollm"
    split = {"type": "Split", "pattern": {"Regex": _LLAMA_3}, "behavior": "Isolated", "invert": False}
    if len(steps) == 2 and steps[0] == split and not steps[1].get("use_regex", True) and whole_words:
        return "llama-bpe"
    return None


def _kind(index: int, tokens: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the type of a token in GGUF; ids that the tokenizer leaves out are padding of the embedding."""
    if index in added:
        return _CONTROL if added[index]["special"] else _USER_DEFINED
    return _NORMAL if index in tokens else _UNUSED


def _merge(entry: str | Sequence[str]) -> str:
    return entry if isinstance(entry, str) else " ".join(entry)


def _adds_bos(content: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer starts a text with its first special token."""
    given = config.get("add_bos_token")
    if isinstance(given, bool):
        return given
    post = content.get("post_processor") or {}
    for step in post.get("processors", [post]):
        single = step.get("single") or []
        if step.get("type") == "TemplateProcessing" and single and "SpecialToken" in single[0]:
            return True
    return False
