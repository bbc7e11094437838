"""`--to onnx`: the model with its policies as an ONNX graph from `input_ids` to `logits`, for any batch and length."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnscale._util.optional import need
from attnscale.errors import ExportError
from attnscale.hf import Handle
from attnscale.policies.base import reads_scores

DTYPE = torch.float32  # onnxruntime has no bf16 kernels for CPUs
CHECKED_DTYPE = None
CHECKED_LENGTHS = (17, 256)

_FILE = "model.onnx"
_TRACED = (2, 40)  # batch and length of the example; neither is baked in


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def plan(handle: Handle, path: str, tokenizer: Path | None) -> None:
    """Raise if a policy reads scores or a package is missing. Whether a model can be traced is known once it is."""
    for layer, policy in handle.policies.items():
        if reads_scores(policy):
            raise ExportError(
                f"policy={policy!r} of {layer} reads the scores of its call, which torch.onnx.export cannot trace; "
                "apply a policy of length, position or query"
            )
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "attnscale export --to onnx", "export")


def write(handle: Handle, _: None, folder: Path) -> None:
    """Trace the model with dynamic batch and length, and write the graph with its weights beside it."""
    model: Any = handle.model
    length = min(_TRACED[1], getattr(model.config, "max_position_embeddings", None) or _TRACED[1])
    tokens = torch.zeros(_TRACED[0], length, dtype=torch.int64, device="cpu")
    dynamic = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx, about its own internals
        try:
            program = torch.onnx.export(
                _Logits(model),
                (tokens,),
                dynamo=True,
                dynamic_shapes=dynamic,
                input_names=["input_ids"],
                output_names=["logits"],
                verbose=False,
            )
        except Exception as error:
            raise ExportError(
                f"{type(model).__name__} was not exported to ONNX, because torch.onnx.export failed: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
            ) from error
    if program is None:
        raise ExportError("torch.onnx.export returned no program")
    program.save(folder / _FILE, external_data=True)


def read(handle: Handle, _: None, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the logits that onnxruntime computes from the written file."""
    runtime = need("onnxruntime", "attnscale export --to onnx", "export")
    session = runtime.InferenceSession(folder / _FILE, providers=["CPUExecutionProvider"])
    sizes = session.get_inputs()[0].shape
    if any(isinstance(size, int) for size in sizes):
        raise ExportError(f"the ONNX graph accepts only input_ids of shape {sizes}: tracing has fixed a size")
    return lambda tokens: torch.from_numpy(session.run(["logits"], {"input_ids": tokens.numpy()})[0])
