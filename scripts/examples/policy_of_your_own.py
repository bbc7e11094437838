"""Define a custom temperature policy, configure it in YAML, train it, and restore it from a checkpoint.

python scripts/examples/policy_of_your_own.py
python scripts/examples/policy_of_your_own.py --steps 200 --folder runs/own

The policy is β = 1 + s·ln(n/L) for n > L, with one s per head: standard attention up to L, and a learned slope beyond
it.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnscale

YAML = """\
# One learned slope per head beyond the reference length.
# attnscale.build_policy("slope_beyond.yaml", reference_length=4096)
name: slope_beyond
num_heads: 4
reference_length: 16
"""


@attnscale.register_policy
@dataclass(eq=False, repr=False, kw_only=True)
class SlopeBeyond(attnscale.LengthPolicy):
    """β = 1 + s·ln(max(n, L)/L) with one parameter s per head."""

    name = "slope_beyond"
    num_heads: int
    reference_length: int = 2048

    def validate(self) -> None:  # called after the fields are set
        self.s = nn.Parameter(torch.full((self.num_heads,), 0.1))

    def formula(self, n: Tensor, position: Tensor) -> Tensor:  # [H, Tq]
        return 1 + self.s[:, None] * torch.log(n.clamp(min=self.reference_length) / self.reference_length)


def main() -> None:
    """Build from YAML, train, save, load, and compare."""
    parser = argparse.ArgumentParser(description="A custom policy, from YAML to checkpoint.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="output folder (default: a temporary folder)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slope_beyond.yaml").write_text(YAML, encoding="utf-8")
    torch.manual_seed(0)
    attention = attnscale.MultiheadAttention(32, 4, batch_first=True, policy=folder / "slope_beyond.yaml")
    optimizer = torch.optim.Adam(attention.parameters(), lr=1e-2)
    for _ in range(options.steps):
        x = torch.randn(16, options.length, 32)
        x[..., 0] *= 4  # task: return the token with the largest first component
        out, _ = attention(x[:, -1:], x, x, need_weights=False)
        loss = nn.functional.mse_loss(out[:, 0], x[torch.arange(16), x[..., 0].argmax(1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy: Any = attention.policy  # the SlopeBeyond of the YAML file
    print(f"loss {loss.item():.3f}, learned slopes {[round(s, 3) for s in policy.s.tolist()]}")

    torch.save(attention.state_dict(), folder / "attention.pt")
    policy.save(folder / "learned.yaml")
    again = attnscale.MultiheadAttention(32, 4, batch_first=True, policy=folder / "learned.yaml")
    again.load_state_dict(torch.load(folder / "attention.pt"))
    same = torch.equal(again(x, x, x, need_weights=False)[0], attention(x, x, x, need_weights=False)[0])
    print(f"loaded from {folder}, same output: {same}")
    print("β of the first head at n = 16, 64, 256:", *(f"{again.policy(n)[0].item():.2f}" for n in (16, 64, 256)))


if __name__ == "__main__":
    main()
