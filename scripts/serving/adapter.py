"""A LoRA adapter with random weights for the tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn


def write_adapter(checkpoint: Path, folder: Path) -> None:
    """Save an adapter for a checkpoint without a policy."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    adapted: Any = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)


def apply_adapter(model: Any, folder: Path) -> Any:
    """Return a model, with or without a policy, with the adapter."""
    return PeftModel.from_pretrained(model, folder).eval()
