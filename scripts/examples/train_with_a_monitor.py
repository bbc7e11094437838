"""Train a tiny GPT under a monitor, and watch the effect of a temperature law on its attention, in a minute or two.

python scripts/examples/train_with_a_monitor.py                           # (ln n)²: the loss stays near 3.9
python scripts/examples/train_with_a_monitor.py --policy log --gamma 0.2  # 0.2·ln n: the loss falls to 0.5
attnscale watch runs/tiny/log_squared.jsonl                               # live view; `report` writes an HTML page
"""

import argparse
import logging
from pathlib import Path

import torch
from torch import Tensor, nn

import attnscale
from attnscale.diagnostics import JsonlSink

VOCABULARY, LENGTH, PERIOD, BATCH = 64, 128, 16, 8


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer with residual connections."""

    def __init__(self, width: int, heads: int, policy: attnscale.Policy) -> None:
        super().__init__()
        self.heads, inner = heads, 4 * width
        self.norm, self.project, self.merge = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = attnscale.ScaledDotProductAttention(policy)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.merge(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class TinyGPT(nn.Module):
    """Embeddings, blocks, and a linear head."""

    def __init__(self, policy: attnscale.Policy, width: int = 64, heads: int = 8, layers: int = 6) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, policy) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens) + self.place(torch.arange(tokens.shape[1]))))


def main() -> None:
    """Train, and print the loss every 50 steps."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT under a monitor.")
    parser.add_argument("--policy", default="log_squared", help="temperature law (default: %(default)s)")
    parser.add_argument("--gamma", type=float, default=1.0, help="factor of the law (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5, help="steps between monitored steps (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSONL to write (default: runs/tiny/POLICY.jsonl)")
    options = parser.parse_args()
    output = options.output or Path("runs", "tiny", f"{options.policy}.jsonl")
    output.unlink(missing_ok=True)
    logging.getLogger("attnscale").setLevel(logging.ERROR)  # alerts go to the file; printed, they would hide the loss
    torch.manual_seed(0)
    model = TinyGPT(attnscale.build_policy(options.policy, gamma=options.gamma))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with attnscale.Monitor(model, every=options.every, sinks=[JsonlSink(output)]) as monitor:
        for step in range(options.steps):
            # Periodic random tokens: predicting them requires attention to one period back.
            tokens = torch.randint(VOCABULARY, (BATCH, PERIOD)).repeat(1, LENGTH // PERIOD + 1)[:, : LENGTH + 1]
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(step, loss=loss)
            if step % 50 == 0 or step == options.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.3f}")
    print(f"wrote {output}; view it with `attnscale report {output}`")


if __name__ == "__main__":
    main()
