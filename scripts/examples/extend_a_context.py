"""Train a tiny model to find one token among 32, then test it on up to 4096 tokens under several temperature laws.

python scripts/examples/extend_a_context.py
python scripts/examples/extend_a_context.py --length 64 --contexts 64 1024 16384

Each token has a key and a value; the query is one of the keys, the answer is the value of that token. With β = 1 the
weight of the right token vanishes as the number of tokens grows. A law anchored at the trained length is 1 there and
sharpens attention beyond it; `floor=True` keeps β = 1 below. The model is not retrained.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import attnscale

KEYS, VALUES, WIDTH, HEADS = 64, 16, 32, 2


class Finder(nn.Module):
    """Attention of one query over tokens without positions, for any number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES, WIDTH)
        self.attention = attnscale.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return logits [B, VALUES] for the queried keys [B], given tokens [B, T]."""
        tokens = self.key(keys) + self.value(values)
        found, _ = self.attention(self.key(asked)[:, None], tokens, tokens, need_weights=False)
        return self.head(found[:, 0])


def task(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queried keys, keys and values of all tokens, and answers. Each queried key occurs exactly once."""
    asked, values = torch.randint(KEYS, (batch,)), torch.randint(VALUES, (batch, length))
    keys = (asked[:, None] + torch.randint(1, KEYS, (batch, length))) % KEYS
    place = torch.randint(length, (batch, 1))
    return asked, keys.scatter(1, place, asked[:, None]), values, values.gather(1, place)[:, 0]


def main() -> None:
    """Train once, then print the accuracy of each law and context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32, help="tokens in training (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16, 32, 128, 512, 2048, 4096])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--samples", type=int, default=512, help="questions per cell (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Finder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(options.steps):
        asked, keys, values, answers = task(64, options.length)
        loss = nn.functional.cross_entropy(model(asked, keys, values), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained at {options.length} tokens, loss {loss.item():.3f}; accuracy by context length:")
    laws = ("constant", "sqrt_log", "log", "log_squared")
    print(f"{'':12s}" + "".join(f"{context:>8d}" for context in options.contexts))
    for law in laws:
        given = {} if law == "constant" else {"reference_length": options.length, "floor": True}
        model.attention.policy = attnscale.build_policy(law, **given)
        rights = []
        with torch.no_grad():
            for context in options.contexts:
                torch.manual_seed(context)
                asked, keys, values, answers = task(options.samples, context)
                rights.append((model(asked, keys, values).argmax(-1) == answers).double().mean().item())
        print(f"{law:12s}" + "".join(f"{right:8.0%}" for right in rights))


if __name__ == "__main__":
    main()
