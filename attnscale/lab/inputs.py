"""Inputs of an evaluation: policies and rotary embeddings in command-line syntax, model folders, text.

Syntax of policies: "log", "gap_adaptive:r=4", "argmax=constant:beta=1e6", "log@yarn:2".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscale._util.files import read_yaml
from attnscale._util.optional import need
from attnscale.errors import ArgumentError, reject
from attnscale.policies import POLICIES, build_policy_for
from attnscale.policies.build import required_fields

EMBEDDED = "embedded"

MOST_BYTES = 8 * 2**20  # read limit for text files: about 2 M tokens of English, 8 windows of 262144

KINDS = ("yarn", "linear")
UNSTRETCHED = "own"  # the rotary embedding of the model's config

# Length laws that are by default anchored at the trained length, with a floor of 1.
ANCHORED = ("sqrt_log", "log", "log_squared", "power")

OWN = "own"  # the policy stored with a model

# Fields that depend on the module, and example values for error messages about other required fields.
_SHAPE = {"num_heads": 1, "head_dim": 2}
_EXAMPLES = {
    "exponent": 0.5,
    "factor": 4,
    "original_length": 4096,
    "reference_length": 4096,
    "a": 4096,
    "rho": 0.5,
    "window": 1024,
}
_ENTRY = re.compile(r"(?:(?P<label>[\w.+-]+)=)?(?P<name>[^:=]+)(?P<parameters>(?::\w+=[^:=]+)*)")


def read_rope(rope: str) -> tuple[str, float]:
    """Return kind and factor of a stretched rotary embedding.

    >>> read_rope("yarn:4")
    ('yarn', 4.0)
    """
    kind, _, factor = rope.partition(":")
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if kind not in KINDS or not 1 <= number < float("inf"):
        reject("rope", rope, f"{' or '.join(f'{kind}:4' for kind in KINDS)}, with a factor >= 1, or {UNSTRETCHED}")
    return kind, number


def stretch(config: Any, rope: str | None, trained_length: int) -> None:
    """Stretch the rotary embedding of a config in place, except in sliding-window layers.

    YaRN's own factor on the logits is disabled, since the policy sets the temperature. The policy yarn:factor=4
    provides that factor.
    """
    if rope is None or rope == UNSTRETCHED:
        return
    kind, factor = read_rope(rope)
    text = config.get_text_config()
    known = getattr(text, "rope_parameters", None)
    if not known:
        raise ArgumentError(f"rope={rope!r} is not accepted: a {text.model_type} model has no rotary embedding")
    stretched: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        stretched |= {"original_max_position_embeddings": trained_length, "attention_factor": 1.0}
    if "rope_theta" in known:
        text.rope_parameters = _base(known) | stretched
    else:  # one rotary embedding per layer type
        text.rope_parameters = known | {"full_attention": _base(known["full_attention"]) | stretched}


def _base(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a rotary embedding without any stretching."""
    return {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}


class Law(NamedTuple):
    """A policy to evaluate: its label in tables, the policy for `attnscale.hf.apply`, and the rotary embedding."""

    label: str
    policy: dict[str, Any]
    rope: str | None = None  # None or "own": the embedding of the model


def read_law(entry: str, trained_length: int, rope: str | None = None) -> Law:
    """Parse a policy; length laws without parameters are anchored at the trained length.

    A suffix `@` with a rotary embedding overrides `rope`. Parameters are checked here, before a model is loaded.

    >>> read_law("log", 128)
    Law(label='log', policy={'name': 'log', 'reference_length': 128, 'floor': True}, rope=None)
    >>> read_law("argmax=constant:beta=1e6", 128)
    Law(label='argmax', policy={'name': 'constant', 'beta': 1000000.0}, rope=None)
    >>> read_law("unstretched=constant@own", 128, rope="yarn:4")
    Law(label='unstretched', policy={'name': 'constant'}, rope='own')
    """
    written, at, own_rope = entry.partition("@")
    rope = own_rope if at else rope
    if rope is not None and rope != UNSTRETCHED:
        read_rope(rope)
    if written.endswith((".yaml", ".yml")):
        label, _, path = written.rpartition("=")
        return Law(label or Path(path).stem + at + own_rope, read_yaml(path), rope)
    found = _ENTRY.fullmatch(written)
    if found is None or found["name"] not in (*POLICIES, OWN):
        accepted = "a policy such as log, gap_adaptive:r=4, argmax=constant:beta=1e6 or log@yarn:2, or a YAML file"
        reject("policies", entry, f"{accepted}; policies: {', '.join(POLICIES)}")
    name, given = found["name"], dict(part.split("=") for part in found["parameters"].split(":")[1:])
    parameters: dict[str, Any] = {key: _number(value) for key, value in given.items()}
    if name in ANCHORED and not parameters:
        parameters = {"reference_length": trained_length, "floor": True}
    if name == OWN and rope is not None and rope != UNSTRETCHED:
        reject("policies", entry, f"{OWN}@{UNSTRETCHED}; a model with its own policy keeps its rotary embedding")
    if name != OWN:
        _check(entry, name, parameters)
    label = found["label"] or name + found["parameters"] + at + own_rope
    return Law(label, {"name": name, **parameters}, rope)


def _check(entry: str, name: str, parameters: dict[str, Any]) -> None:
    """Raise for missing parameters, with an example, and for invalid ones."""
    missing = [field for field in required_fields(POLICIES[name]) if field not in parameters | _SHAPE]
    if not set(missing) <= _EXAMPLES.keys():
        reject("policies", entry, f"a YAML file, since {name} requires {', '.join(missing)}")
    if missing:
        example = ":".join([name, *(f"{field}={_EXAMPLES[field]}" for field in missing)])
        reject("policies", entry, f"{name} with {' and '.join(missing)}, such as {example}")
    build_policy_for({"name": name, **parameters}, **_SHAPE)


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def embedded_folder() -> Path:
    """Return the folder of the model in this package."""
    return Path(str(files("attnscale.lab").joinpath("embedded")))


@dataclass(frozen=True)
class ModelFolder:
    """A folder written by `save_pretrained`; "embedded" is the model in this package."""

    name: str
    path: Path
    dtype: str = "float32"

    @classmethod
    def at(cls, given: str, dtype: str) -> ModelFolder:
        """Return a folder given by the user; raise if it cannot contain a model."""
        path = embedded_folder() if given == EMBEDDED else Path(given)
        if not (path / "config.json").is_file():
            reject("model", given, "a folder with the config.json of a HuggingFace model, or 'embedded'")
        if not any(path.glob("*.safetensors")):
            reject("model", given, "a folder with config.json and weights (*.safetensors)")
        if dtype not in ("float32", "bfloat16", "float16"):
            reject("dtype", dtype, "float32, bfloat16 or float16")
        return cls(EMBEDDED if given == EMBEDDED else path.resolve().name, path, dtype)

    @cached_property
    def trained_length(self) -> int | None:
        """Trained length according to the config, or None; a stretched rotary embedding does not change it."""
        from attnscale.hf.context import trained_length

        return trained_length(self._config())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of config and weights."""
        digest = hashlib.sha256()
        for path in sorted([self.path / "config.json", *self.path.glob("*.safetensors")]):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def load(self, rope: str | None = None, trained_length: int = 0) -> nn.Module:
        """Load the model in evaluation mode, on a GPU if available, optionally with a stretched rotary embedding."""
        transformers, config = need("transformers", "evaluate", "hf"), self._config()
        stretch(config, rope, trained_length)
        options = {"config": config, "dtype": getattr(torch, self.dtype)}
        model: nn.Module = self._read(
            "model", lambda: transformers.AutoModelForCausalLM.from_pretrained(self.path, **options)
        )
        return _placed(model)

    def load_with_policy(self) -> nn.Module:
        """Load the model with the policy stored in its checkpoint."""
        import attnscale.hf

        handle = self._read("model", lambda: attnscale.hf.load(self.path, dtype=getattr(torch, self.dtype)))
        return _placed(handle.model)

    def tokenizer(self) -> Any:
        """Load the tokenizer."""
        transformers = need("transformers", "evaluate", "hf")
        found = self._read("tokenizer of model", lambda: transformers.AutoTokenizer.from_pretrained(self.path))
        if len(found) <= len(set(found.all_special_ids)):  # transformers' stand-in for missing files
            files = "the tokenizer files of the model (tokenizer.json, tokenizer_config.json)"
            reject("model", str(self.path), f"a folder that also has {files}")
        return found

    def _config(self) -> Any:
        transformers = need("transformers", "evaluate", "hf")
        return self._read("config of model", lambda: transformers.AutoConfig.from_pretrained(self.path))

    def _read(self, what: str, read: Callable[[], Any]) -> Any:
        logging = need("transformers.utils.logging", "evaluate", "hf")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # the evaluation shows its own
        try:
            return read()
        except ArgumentError:
            raise
        except Exception as error:  # a broken file can raise almost any exception
            why = _first_sentence(str(error)) or type(error).__name__
            raise ArgumentError(f"{what}={str(self.path)!r} cannot be loaded: {why}") from error
        finally:
            if shown:
                logging.enable_progress_bar()

    def refuse_too_long(self, model: nn.Module, length: int) -> None:
        """Raise for a length beyond a table of learned positions; rotary embeddings have no such limit."""
        from attnscale.hf.context import position_table

        limit = position_table(model)
        if limit is not None and length > limit:
            reject("lengths", length, f"at most {limit}, the size of the model's position embedding")


def _first_sentence(text: str) -> str:
    """Return the text up to the first line that ends a sentence, as one line.

    >>> _first_sentence("Expected one of: \\n(1) a file \\n(2) an instance. \\nSee the documentation.")
    'Expected one of: (1) a file (2) an instance.'
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    ends = (number for number, line in enumerate(lines, 1) if line.endswith((".", "!", "?")))
    return " ".join(lines[: next(ends, len(lines))])


def _placed(model: nn.Module) -> nn.Module:
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class Text(NamedTuple):
    """The tokens [N] of a text, their hash, and the tokenizer."""

    tokens: Tensor
    digest: str
    tokenizer: Any

    @classmethod
    def read(cls, path: str | None, tokenizer: Any) -> Text:
        """Read a text file, or the held-out verse of the embedded model."""
        if path is None:
            content = files("attnscale.lab").joinpath("embedded", "held_out.txt").read_bytes()
        else:
            content = _first_bytes(path)
        tokens = torch.tensor(
            tokenizer(content.decode("utf-8", "replace"), add_special_tokens=False).input_ids, device="cpu"
        )
        return cls(tokens.long(), hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16], tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokenize text without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def size(self, tokens: Tensor) -> int:
        """Return the number of UTF-8 bytes of consecutive tokens [T].

        The tokens are decoded together: a single token may be part of a character, or lose its leading space.
        """
        text: str = self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        return len(text.encode())


def _first_bytes(path: str) -> bytes:
    if not Path(path).is_file():
        reject("text", path, "an existing text file")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES)
    except OSError as error:
        raise ArgumentError(f"text={path!r} cannot be read: {error.strerror}") from error
    if not content.strip():
        reject("text", path, "a text file that is not empty")
    return content
