"""Training of the embedded model: a two-layer byte-level decoder that retrieves values by their keys in English verse.

The first layer sees four tokens through a rotary embedding, the second all tokens without positions. The effect of
length on the second layer's attention is therefore not confounded with that on a position embedding.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from attnscale._util.optional import need
from attnscale.errors import reject
from attnscale.lab.sequences import BYTES

Progress = Callable[[int, int, str], None]

NEEDLE_BYTES = 4  # \x01, two key bytes, one value byte


@dataclass(frozen=True)
class Training:
    """The models to train, and the training recipe.

    Args:
        output: Folder that receives one model folder per policy and seed.
        policies: The policies to train with: "constant", "log", "ssmax", "gap_adaptive".
        seeds: Seeds of weights and data.
        steps: AdamW steps, with 50 warm-up steps and a cosine schedule.
        length: The longest sequence. Over the first half of the steps the maximum grows from 32 to this value.
        batch: Sequences per step.
        learning_rate: The peak learning rate.
        weight_decay: The decay of AdamW.
    """

    output: str
    policies: tuple[str, ...] = ("constant",)
    seeds: tuple[int, ...] = (0,)
    steps: int = 1000
    length: int = 128
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.2

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            reject("steps, batch", (self.steps, self.batch), "numbers >= 1")
        if self.length < 32 or self.length % 4:
            reject("length", self.length, "a multiple of 4, at least 32")
        if not self.weight_decay >= 0 or math.isinf(self.weight_decay):
            reject("weight_decay", self.weight_decay, "a number >= 0")


def run(training: Training, progress: Progress | None = None) -> Path:
    """Train all models missing in the output folder; each model is written atomically."""
    output = Path(training.output)
    jobs = [(policy, seed) for policy in training.policies for seed in training.seeds]
    for number, (policy, seed) in enumerate(jobs):
        folder = output / f"{policy}-{seed}"
        if folder.exists():
            continue
        label = f"{policy}, seed {seed}"

        def report(step: int, label: str = label, number: int = number) -> None:
            if progress is not None:
                progress(number * training.steps + step, len(jobs) * training.steps, label)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # fp32 sums depend on it; a seed must give one model
        try:
            model = train(training, policy, seed, report)
        finally:
            torch.set_num_threads(threads)
        partial = output / f".{folder.name}.part"
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)  # type: ignore[operator]
        save_byte_tokenizer(partial)
        partial.rename(folder)
    return output


def build_model(length: int, seed: int) -> nn.Module:
    """Return the untrained model. Biases let the first layer attend by position alone; random embeddings do not."""
    transformers = need("transformers", "the embedded model", "hf")
    config = transformers.SmolLM3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=length,
        layer_types=["sliding_attention", "full_attention"],
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attention_bias=True,
        tie_word_embeddings=False,
        initializer_range=64**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.SmolLM3ForCausalLM(config)
        nn.init.normal_(model.get_input_embeddings().weight, std=1.0)  # type: ignore[operator]
    return model


def train(training: Training, policy: str, seed: int, report: Callable[[int], None] = lambda step: None) -> nn.Module:
    """Return a trained model in eval mode.

    The policy stays applied, except for "constant".
    """
    import attnscale.hf

    model = build_model(training.length, seed)
    learned: dict[str, Any] = {"constant": {}, "log": {"reference_length": training.length}}.get(policy, {})
    handle = attnscale.hf.apply(model, policy, layers="nope", **learned)
    text, generator = read_text("train"), Generator().manual_seed(seed)
    decay, betas = training.weight_decay, (0.9, 0.98)
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate, betas, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / training.steps))
    )
    model.train()
    for step in range(training.steps):
        longest = min(training.length, 32 + int((training.length - 32) * 2 * step / training.steps))
        length = 4 * int(torch.randint(8, longest // 4 + 1, (1,), generator=generator, device=generator.device))
        needles = int(torch.randint(1, max(2, length // 12 + 1), (1,), generator=generator, device=generator.device))
        tokens = sample_batch(text, training.batch, length, needles, generator)
        logits = model(tokens[:, :-1]).logits.transpose(1, 2)
        losses = cross_entropy(logits, tokens[:, 1:], reduction="none")  # [B, T − 1]
        asked = needles * NEEDLE_BYTES  # the last tokens; losses[:, i] belongs to token i + 1
        loss = losses[:, :-asked].mean() + losses[:, NEEDLE_BYTES - 1 - asked :: NEEDLE_BYTES].mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step + 1)
    if policy == "constant":
        handle.remove()
    return model.eval()


def read_text(part: str) -> Tensor:
    """Return the bytes [N] of Paradise Lost (1667): "train", or "held_out", its end, which no model was trained on."""
    content = files("attnscale.lab").joinpath("embedded", f"{part}.txt").read_bytes()
    return torch.tensor(list(content), device="cpu")


def sample_batch(text: Tensor, batch: int, length: int, needles: int, generator: Generator) -> Tensor:
    """Return sequences [B, length]: verse overwritten with needles, followed by all needles in another order.

    The last byte of each repeated needle is the answer. Batched version of `hide_needles` in the format `BYTES`.
    """
    body, symbols = length - NEEDLE_BYTES * needles, torch.tensor(list(BYTES.alphabet.encode()), device="cpu")
    start = torch.randint(len(text) - body, (batch, 1), generator=generator, device=generator.device)
    tokens = torch.empty(batch, length, dtype=torch.long, device="cpu")
    tokens[:, :body] = text[start + torch.arange(body, device="cpu")]
    keys = torch.rand(batch, BYTES.most_keys, generator=generator, device=generator.device).argsort(1)[:, :needles]
    values = torch.randint(len(symbols), (batch, needles), generator=generator, device=generator.device)
    marks = torch.ones_like(keys)
    written = torch.stack([marks, symbols[keys // len(symbols)], symbols[keys % len(symbols)], symbols[values]], -1)
    slots = (
        torch.rand(batch, body // NEEDLE_BYTES, generator=generator, device=generator.device).argsort(1)[:, :needles]
        * NEEDLE_BYTES
    )
    tokens.scatter_(1, (slots[..., None] + torch.arange(NEEDLE_BYTES, device="cpu")).flatten(1), written.flatten(1))
    order = torch.rand(batch, needles, generator=generator, device=generator.device).argsort(1)
    tokens[:, body:] = written.gather(1, order[..., None].expand(-1, -1, NEEDLE_BYTES)).flatten(1)
    return tokens


def save_byte_tokenizer(folder: str | Path) -> None:
    """Write the files of a UTF-8 byte tokenizer for `AutoTokenizer.from_pretrained(folder)`."""
    tokenizers, transformers = (need(name, "the byte tokenizer", "hf") for name in ("tokenizers", "transformers"))
    vocabulary = {symbol: byte for byte, symbol in _symbols().items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _symbols() -> dict[int, str]:
    """Return the symbol of each byte in `ByteLevel`: the byte itself if printable, else a code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
