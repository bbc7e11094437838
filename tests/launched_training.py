"""A HuggingFace Trainer with a monitor callback, in one process or in two started by `accelerate launch`."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import transformers
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType, TorchContextParallelConfig
from tiny_models import llama

import attnscale
import attnscale.hf
from attnscale import Monitor
from attnscale.diagnostics.sinks import MemorySink

ROTATIONS = ("allgather", "alltoall")
LENGTH = 16
STEPS = 2


def train(batch: int, rotation: str | None = None) -> dict[str, Any]:
    """Train two steps; return the result, the logs, and the rows of the records.

    Every process takes `batch` sequences per step; with a `rotation`, two processes share them.
    """
    model = llama().float().train()
    handle = attnscale.hf.apply(model, {"name": "ssmax", "reference_length": 8}, override=True)
    tokens = torch.randint(1, 64, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {} if rotation is None else split_sequences(rotation)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=batch, use_cpu=True, report_to=[], save_strategy="no",
            logging_steps=1, disable_tqdm=True, learning_rate=0.05, lr_scheduler_type="constant", optim="sgd",
            max_grad_norm=0.0, **options,
        )  # fmt: skip
        if rotation is not None:
            # accelerate allows FSDP, and with it a ParallelismConfig, for a list of device types without CPU
            # (AcceleratorState). Another type passes this check; nothing after it needs a GPU.
            PartialState().distributed_type = DistributedType.MULTI_GPU
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        memory = MemorySink()
        monitor = Monitor(model, every=1, rows=None, sinks=[memory], alerts=None)
        attnscale.hf.AttnScaleCallback(monitor).attach(trainer)
        trainer.train()
    logged = [log for log in trainer.state.log_history if "attn/max_logit" in log]
    learned = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in handle.parameters()]
    return {
        "kind": type(trainer.model_wrapped).__name__,
        "world": arguments.world_size,
        "learned": learned,
        "steps": [(log["loss"], log["grad_norm"]) for log in logged],
        "seen": [(record.layer, record.head, *record.forward["visible"]) for record in memory.records],
    }


def split_sequences(rotation: str) -> dict[str, Any]:
    """`TrainingArguments` that split sequences over two processes."""
    handler = TorchContextParallelConfig(cp_comm_strategy=rotation)
    return {"fsdp": True, "parallelism_config": ParallelismConfig(cp_size=2, cp_handler=handler)}


if __name__ == "__main__":
    found = {"data parallel": train(batch=1)} | {rotation: train(1, rotation) for rotation in ROTATIONS}
    torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
