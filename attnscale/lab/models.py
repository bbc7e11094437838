"""What an evaluation reads from disk: the folder of a model, and a text in its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscale._util.optional import need
from attnscale.errors import ArgumentError, reject
from attnscale.lab.laws import stretch

EMBEDDED = "embedded"

MOST_BYTES = 8 * 2**20  # of a longer file the rest is not read: 2 M tokens of English are 8 windows of 262144


@dataclass(frozen=True)
class ModelFolder:
    """A folder that `save_pretrained` wrote; "embedded" is the model in this package."""

    name: str
    path: Path
    dtype: str = "float32"

    @classmethod
    def at(cls, given: str, dtype: str) -> ModelFolder:
        """The folder that a user names; what cannot be a model is refused before anything is computed."""
        path = Path(str(files("attnscale.lab").joinpath("embedded"))) if given == EMBEDDED else Path(given)
        if not (path / "config.json").is_file():
            reject("model", given, "a folder with the config.json of a HuggingFace model, or 'embedded'")
        if not any(path.glob("*.safetensors")):
            reject("model", given, "a folder with weights (*.safetensors) beside its config.json")
        if dtype not in ("float32", "bfloat16", "float16"):
            reject("dtype", dtype, "float32, bfloat16 or float16")
        return cls(EMBEDDED if given == EMBEDDED else path.resolve().name, path, dtype)

    @cached_property
    def trained_length(self) -> int | None:
        """The length that the config names; None where it names none."""
        return getattr(self._config().get_text_config(), "max_position_embeddings", None)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of config and weights."""
        digest = hashlib.sha256()
        for path in sorted([self.path / "config.json", *self.path.glob("*.safetensors")]):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def load(self, rope: str | None = None, trained_length: int = 0) -> nn.Module:
        """The model in eval mode, on a GPU where there is one; with another rotary embedding if asked."""
        transformers, config = need("transformers", "evaluate", "hf"), self._config()
        stretch(config, rope, trained_length)
        options = {"config": config, "dtype": getattr(torch, self.dtype)}
        model: nn.Module = self._read(
            "model", lambda: transformers.AutoModelForCausalLM.from_pretrained(self.path, **options)
        )
        return _placed(model)

    def load_with_policy(self) -> nn.Module:
        """The same with the policy that it was saved with."""
        import attnscale.hf

        handle = self._read("model", lambda: attnscale.hf.load(self.path, dtype=getattr(torch, self.dtype)))
        return _placed(handle.model)

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        transformers = need("transformers", "evaluate", "hf")
        return self._read("tokenizer of model", lambda: transformers.AutoTokenizer.from_pretrained(self.path))

    def _config(self) -> Any:
        transformers = need("transformers", "evaluate", "hf")
        return self._read("config of model", lambda: transformers.AutoConfig.from_pretrained(self.path))

    def _read(self, what: str, read: Callable[[], Any]) -> Any:
        logging = need("transformers.utils.logging", "evaluate", "hf")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # the evaluation has its own
        try:
            return read()
        except ArgumentError:
            raise
        except Exception as error:  # a broken file surfaces as many kinds of exception
            why = _first_sentence(str(error)) or type(error).__name__
            raise ArgumentError(f"{what}={str(self.path)!r} cannot be loaded: {why}") from error
        finally:
            if shown:
                logging.enable_progress_bar()

    def refuse_too_long(self, model: nn.Module, length: int) -> None:
        """Refuse a length beyond a table of learned positions; rotary embeddings have no such end."""
        inputs = model.get_input_embeddings()  # type: ignore[operator]
        limit = self.trained_length
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module is not inputs and limit is not None:
                rows = module.num_embeddings
                if limit <= rows <= limit + 2 and length > limit:
                    reject("lengths", length, f"at most {limit}: this model has a table of that many positions")


def _first_sentence(text: str) -> str:
    """The lines of a text up to the first that ends a sentence, as one line.

    >>> _first_sentence("Expected one of: \\n(1) a file \\n(2) an instance. \\nSee the documentation.")
    'Expected one of: (1) a file (2) an instance.'
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    ends = (number for number, line in enumerate(lines, 1) if line.endswith((".", "!", "?")))
    return " ".join(lines[: next(ends, len(lines))])


def _placed(model: nn.Module) -> nn.Module:
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class Text(NamedTuple):
    """The tokens [N] of a text, a hash of them, and the tokenizer that made them."""

    tokens: Tensor
    digest: str
    tokenizer: Any

    @classmethod
    def read(cls, path: str | None, tokenizer: Any) -> Text:
        """The text in a file, or the verse that the embedded model is tested on."""
        if path is None:
            content = files("attnscale.lab").joinpath("embedded", "held_out.txt").read_bytes()
        else:
            content = _first_bytes(path)
        tokens = torch.tensor(
            tokenizer(content.decode("utf-8", "replace"), add_special_tokens=False).input_ids, device="cpu"
        )
        return cls(tokens.long(), hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16], tokenizer)

    def encode(self, text: str) -> list[int]:
        """The tokens of a piece of text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def size(self, tokens: Tensor) -> int:
        """How many bytes consecutive tokens [T] are in UTF-8.

        They are counted together: alone, a token may be a part of a character, or lose the space that it begins with.
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
