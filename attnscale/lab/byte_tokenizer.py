"""A tokenizer without a vocabulary to learn: the token of a byte is the byte."""

from __future__ import annotations

from pathlib import Path

from attnscale._util.optional import need


def save_byte_tokenizer(folder: str | Path) -> None:
    """Write the files with which `AutoTokenizer.from_pretrained(folder)` reads and writes UTF-8 bytes."""
    tokenizers, transformers = (need(name, "the byte tokenizer", "hf") for name in ("tokenizers", "transformers"))
    vocabulary = {symbol: byte for byte, symbol in _symbols().items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _symbols() -> dict[int, str]:
    """The printable symbol that `ByteLevel` has for each byte: itself where it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
