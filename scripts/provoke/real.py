"""Fine-tuning of a real model, SmolLM2-135M, on enwik8. `python scripts/smollm2.py` downloads both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.provoke.runs import Experiment

FOLDER = Path(".cache", "smollm2")
LENGTH, BATCH = 256, 2


class SmolLM2(nn.Module):
    """The pretrained model. `loss` draws its own tokens."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(FOLDER)
        with (FOLDER / "enwik8").open("rb") as file:
            text = file.read(2_000_000).decode(errors="ignore")
        self.tokens = torch.tensor(tokenizer(text)["input_ids"])
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="sdpa")

    def loss(self, _: Tensor) -> Tensor:
        """Cross entropy of the next token."""
        starts = torch.randint(len(self.tokens) - LENGTH - 1, (BATCH,))
        tokens = torch.stack([self.tokens[start : start + LENGTH + 1] for start in starts])
        return F.cross_entropy(self.model(tokens[:, :-1]).logits.mT, tokens[:, 1:])


FINE_TUNING = Experiment("SmolLM2-135M", SmolLM2, steps=100, rate=2e-5)
