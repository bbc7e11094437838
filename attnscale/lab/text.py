"""The text of an evaluation in the tokens of a model."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.errors import ArgumentError, reject

MOST_BYTES = 8 * 2**20  # of a longer file the rest is not read: 2 M tokens of English are 8 windows of 262144


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
