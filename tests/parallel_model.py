"""A small model, and its training in one process or in several, with every parallel method of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from attnscale import Monitor, ScaledDotProductAttention, build_policy

HEADS, WIDTH, TOKENS, LENGTH, BATCH = 4, 16, 11, 16, 2
EDGES = torch.tensor([0, 5, 12, LENGTH])  # packed documents
STEPS = 20
POLICIES: dict[str, dict[str, Any]] = {
    "constant": {"name": "constant"},
    "log": {"name": "log", "reference_length": 8},
    "ssmax": {"name": "ssmax", "num_heads": HEADS, "reference_length": 8},
    "gap_adaptive": {"name": "gap_adaptive", "scope": "head", "num_heads": HEADS, "momentum": 0.5},
    "asentmax": {"name": "asentmax", "num_heads": HEADS, "head_dim": WIDTH // HEADS},
    "qassmax": {"name": "qassmax", "num_heads": HEADS, "head_dim": WIDTH // HEADS, "hidden": 6},
    "window_schedule": {"name": "window_schedule", "window": 4},
    # The learned heads 1-2 span two processes; the default policy has no parameters.
    "per_head": {"name": "per_head", "num_heads": HEADS, "default": "log", "heads": {"1-2": {"name": "ssmax"}}},
}


class Block(nn.Module):
    """Attention with a projection that groups q, k and v by head, so that heads can be distributed."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = ScaledDotProductAttention(build_policy(POLICIES[policy]))

    def forward(self, x: Tensor, **rules: Any) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, WIDTH // HEADS)).transpose(1, 2)  # [B, H, T, 3, D]
        mixed = self.attention(*heads.unbind(-2), is_causal=True, **rules)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, policy: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)  # without it equal tokens tie, and Λ = ∞ depends on rounding
        self.block = Block(policy)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, places: Tensor, **rules: Any) -> Tensor:
        return self.head(self.block(self.embed(tokens) + self.place(places), **rules))


def build(policy: str, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model(policy).to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [B, T] each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def add_up(state, bucket):  # no annotations: DDP reads them, and they are strings here
    """Sum gradients over processes instead of averaging, so that gradients of activations match a single process."""
    future = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@dataclass
class Run:
    """A model in training, as one process of a parallel method."""

    mode: str
    policy: str
    packed: bool
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.model = self.wrapped = build(self.policy, self.dtype)
        self.first: dict[str, Tensor] = {}  # the output and the gradients of the first step
        size = 1 if self.mode == "alone" else distributed.get_world_size()
        rank = 0 if self.mode == "alone" else distributed.get_rank()
        self.rows, self.columns = torch.arange(BATCH), torch.arange(LENGTH)
        self.rules: dict[str, Any] = {"cu_seqlens": EDGES} if self.packed else {}
        if self.mode != "alone":
            self._spread(init_device_mesh("cpu", (size,), mesh_dim_names=(self.mode[:2],)), rank, size)
        # foreach, unless only some parameters are DTensors.
        together = self.mode != "tp"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=together)

    def _spread(self, mesh: Any, rank: int, size: int) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from attnscale.distributed import ContextParallel, HeadParallel

        if self.mode in ("ddp", "fsdp2"):
            self.rows = torch.arange(rank * BATCH // size, (rank + 1) * BATCH // size)
        if self.mode == "fsdp2":
            for part in (self.model.block, self.model):
                fully_shard(part, mesh=mesh).set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo supports no other in fp32
        if self.mode == "tp":
            plan = {"qkv": ColwiseParallel(), "attention": HeadParallel(), "o": RowwiseParallel()}
            parallelize_module(self.model.block, mesh, plan)
        if self.mode.startswith("cp"):
            from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

            places = _HeadTailLoadBalancer(LENGTH, size, "cpu")._generate_indices()
            self.rules["positions"] = places
            self.columns = places.view(size, -1)[rank].long()
            method = self.mode.removeprefix("cp-")
            parallelize_module(self.model.block, mesh, {"attention": ContextParallel(method=method)})
        if self.mode == "ddp" or self.mode.startswith("cp"):
            self.wrapped = nn.parallel.DistributedDataParallel(self.model)
            self.wrapped.register_comm_hook(None, add_up)

    def own(self, x: Tensor) -> Tensor:
        """The part of [B, T, ...] of this process."""
        return x[self.rows][:, self.columns]

    def step(self, number: int) -> Tensor:
        """Make one step; return this process's part of the loss."""
        tokens, targets = (self.own(x) for x in batch(number))
        logits = self.wrapped(tokens, self.columns, **self.rules)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * LENGTH)
        self.optimizer.zero_grad()
        loss.backward()
        if not self.first:  # only this one: gathering takes as long as a step
            self.first = {f"gradient {name}": whole(p.grad) for name, p in self.model.named_parameters()}
            self.first["output"] = self._of_all(logits.detach())
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int = STEPS, *, start: int = 0, monitored: bool = True) -> dict[str, Any]:
        """Return output and gradients of the first step, then state, logits and records."""
        records = []
        monitor = Monitor(self.model, every=steps - 1, rows=None, alerts=None) if monitored else None
        for number in range(start, start + steps):
            self.step(number)
            records += [] if monitor is None else [record.as_dict() for record in monitor.step(number)]
        if monitor is not None:
            monitor.close()
        state = {name: whole(x) for name, x in self.model.state_dict().items()}
        return {"first": self.first, "state": state, "logits": self.logits(), "records": records}

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of the whole batch of another step, [B, T, tokens], in evaluation mode with frozen estimates."""
        self.model.eval()
        own = self.wrapped(self.own(batch(1000)[0]), self.columns, **self.rules)
        self.model.train()
        return self._of_all(own)

    def _of_all(self, own: Tensor) -> Tensor:
        """Gather the logits of the whole batch."""
        found = own.new_zeros(BATCH, LENGTH, TOKENS)
        found[self.rows[:, None], self.columns] = own
        if self.mode not in ("alone", "tp"):
            distributed.all_reduce(found)
        return found


def whole(x: Tensor) -> Tensor:
    """Return the full tensor of a possibly sharded one."""
    full = getattr(x.detach(), "full_tensor", None)
    return (x.detach() if full is None else full()).clone()
