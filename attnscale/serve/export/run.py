"""Export a checkpoint: refuse or write to a temporary folder, compare with the source model, then rename."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnscale._util.optional import need
from attnscale.errors import ArgumentError, ExportError, reject

if TYPE_CHECKING:
    from attnscale.hf import Handle

# Each format is a module of this folder that implements `Format`.
FORMATS = ("vllm", "mistral", "gguf", "onnx")

# An export may differ from its source by this much in log-probability, or by _ROUNDINGS times the difference between
# the source and the source in the next wider dtype.
_LIMIT = 1e-4
_ROUNDINGS = 4

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)

Logits = Callable[[Tensor], Tensor]


class Format(Protocol):
    """The functions of a module that writes a format.

    `plan` refuses a model or a policy before anything is written. `read` returns a function from tokens [B, T] to
    logits [B, T, V] that is computed from the written files.
    """

    DTYPE: torch.dtype | None  # to load the source in; None for its own
    CHECKED_DTYPE: torch.dtype | None  # of the source in the comparison; None for DTYPE
    CHECKED_LENGTHS: tuple[int, ...]

    def plan(self, handle: Handle, path: str, tokenizer: Path | None) -> Any: ...
    def write(self, handle: Handle, plan: Any, folder: Path) -> None: ...
    def read(self, handle: Handle, plan: Any, folder: Path) -> Logits: ...


class Export(NamedTuple):
    """A finished export.

    Attributes:
        path: the folder.
        difference: largest difference in log-probability from the source model, over all tokens and positions.
        lengths: the lengths of the compared texts, in tokens.
    """

    path: Path
    difference: float
    lengths: tuple[int, ...]


def export_model(
    path: str | Path, to: str, output: str | Path | None = None, *, tokenizer: str | Path | None = None
) -> Export:
    """Export a model that was saved with a policy to a format of a serving engine, and check the result.

    The export is compared with the source model on random tokens. Until that comparison has passed, it exists only in
    a temporary folder beside `output`, which is removed on any error.

    Args:
        path: the model, as for `attnscale.hf.load`.
        to: "vllm", "mistral", "gguf" or "onnx".
        output: a folder that does not exist yet; default: the name of the model and the format, in the current folder.
        tokenizer: for "gguf": a GGUF file with the tokenizer of the model, instead of converting tokenizer.json.

    Returns:
        The folder, the largest difference and the compared lengths.

    Raises:
        ArgumentError: an unknown format, an existing output, or a model or policy that the format cannot express.
        ExportError: the written model differs from its source.

    Example:
        >>> import tempfile
        >>> import attnscale
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64,
        ...     hidden_size=32,
        ...     intermediate_size=48,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=4,
        ...     max_position_embeddings=256,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with attnscale.hf.apply(LlamaForCausalLM(config), "log", reference_length=64) as handle:
        ...         handle.model.save_pretrained(f"{folder}/model")
        ...     export = export_model(f"{folder}/model", "mistral", f"{folder}/exported")
        >>> export.path.name, export.difference < 1e-4
        ('exported', True)
    """
    if to not in FORMATS:
        reject("to", to, ", ".join(FORMATS))
    if tokenizer is not None and to != "gguf":
        reject("tokenizer", str(tokenizer), "None except with to='gguf'; other formats keep the files of the tokenizer")
    target = Path(output if output is not None else f"{Path(path).name}-{to}").absolute()
    if target.exists():
        reject("output", str(output or target.name), "a folder that does not exist yet")
    need("transformers", "attnscale export", "hf")
    form: Format = importlib.import_module(f"attnscale.serve.export.{to}")
    handle = _load(path, form.DTYPE)
    planned = form.plan(handle, str(path), None if tokenizer is None else Path(tokenizer))
    existing = next(parent for parent in target.parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=existing, prefix=f".{target.name}.") as beside:
        made = Path(beside, "made")
        made.mkdir()
        form.write(handle, planned, made)
        if to in ("vllm", "mistral"):
            _copy_tokenizer(path, made)
        export = _check(path, handle, form.read(handle, planned, made), form, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        made.rename(target)
    return export


def _load(path: str | Path, dtype: torch.dtype | None) -> Handle:
    """Load the source with its policies, in evaluation mode."""
    from transformers import PreTrainedModel

    from attnscale.hf import load

    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    handle = load(path, **given)
    if not isinstance(handle.model, PreTrainedModel):
        raise ArgumentError(
            f"path={str(path)!r} is not accepted: it holds an adapter; merge it first with "
            "attnscale.hf.load(path).model.merge_and_unload() and save_pretrained"
        )
    model: Any = handle.model
    model.eval()
    return handle


def _copy_tokenizer(path: str | Path, folder: Path) -> None:
    from attnscale.hf.checkpoint import StoredFiles

    files = StoredFiles(path, {})
    for name in _TOKENIZER_FILES:
        file = files.file(name)
        if file is not None:
            (folder / name).write_bytes(file.read_bytes())


def _check(path: str | Path, handle: Handle, exported: Logits, form: Format, target: Path) -> Export:
    """Compare an export with its source on random tokens; raise if they differ by more than rounding."""
    model: Any = handle.model
    if form.CHECKED_DTYPE not in (None, model.dtype):
        model = _load(path, form.CHECKED_DTYPE).model
    longest = getattr(model.config, "max_position_embeddings", None) or max(form.CHECKED_LENGTHS)
    lengths = tuple(dict.fromkeys(min(length, longest) for length in form.CHECKED_LENGTHS))
    generator = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    texts = [torch.randint(size, (1, length), generator=generator, device="cpu") for length in lengths]
    own = [_log_probabilities(lambda tokens: model(tokens, use_cache=False).logits, text) for text in texts]
    difference = max(_largest(_log_probabilities(exported, text), seen) for text, seen in zip(texts, own, strict=True))
    if not difference <= _LIMIT:
        wide: Any = _load(path, torch.float64 if model.dtype == torch.float32 else torch.float32).model
        pairs = zip(texts, own, strict=True)
        rounding = max(_largest(_log_probabilities(lambda t: wide(t, use_cache=False).logits, a), b) for a, b in pairs)
        if not difference <= _ROUNDINGS * rounding:
            raise ExportError(
                f"the export to {target} was not written: it differs from the source by {difference:.2g} in "
                f"log-probability, more than {_LIMIT:g} and than {_ROUNDINGS} times the rounding of the source, "
                f"{rounding:.2g}"
            )
    return Export(target, difference, lengths)


def _log_probabilities(logits: Logits, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return logits(tokens)[0].float().log_softmax(-1)


def _largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; NaN if one of them has it."""
    return float((one - other).abs().max())
