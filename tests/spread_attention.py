"""Attention of a sequence distributed over two processes, with every method, for comparison with a single process."""

from __future__ import annotations

from typing import Any

import torch
from parallel_model import HEADS
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnscale
from attnscale import StatsRequest
from attnscale.distributed import TokenShards, context_parallel_attention

TOKENS, DIM = 32, 8
REQUEST = StatsRequest(gap_thresholds=(0.5, 1.0), accumulation="bracket")
EXACT = StatsRequest(gap_thresholds=(0.5, 1.0), accumulation="exact")
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "packed": {"is_causal": True, "cu_seqlens": torch.tensor([0, 5, 21, TOKENS])},
    "documents": {"document_ids": torch.tensor([0] * 11 + [1] * 21)},
    "window": {"is_causal": True, "window": 7},
    "padded": {"is_causal": True, "key_padding": torch.arange(TOKENS) < torch.tensor([[3], [0]])},
    "capped": {"is_causal": True, "softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS).double()},
}
POLICIES: dict[str, dict[str, Any]] = {
    "ssmax": {"name": "ssmax", "num_heads": HEADS},
    "asentmax": {"name": "asentmax", "num_heads": HEADS, "head_dim": DIM},
    "qassmax": {"name": "qassmax", "num_heads": HEADS, "head_dim": DIM, "hidden": 6},
    "gap_adaptive": {"name": "gap_adaptive"},
    "gap_adaptive through": {"name": "gap_adaptive", "exact": True, "gradient": "through"},
    "entropy_adaptive": {"name": "entropy_adaptive"},
}
METHODS = ("gather", "ulysses", "ring")
FLOATING = ("lse", "max_logit", "w_max", "entropy", "criticality")


def attend(attention: Any, policy: str, rule: str, own: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Output, statistics and gradients of some tokens of a fixed sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, HEADS, TOKENS, DIM), (2, 2, TOKENS, DIM), (2, 2, TOKENS, DIM + 1), (2, HEADS, TOKENS, DIM + 1)
    *inputs, weight = (torch.randn(shape, dtype=torch.float64, generator=generator)[:, :, own] for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    torch.manual_seed(1)
    law = attnscale.build_policy(POLICIES[policy]).double()
    request = EXACT if "through" in policy else REQUEST
    for parameter in law.parameters():
        nn.init.uniform_(parameter)
    out, stats = attention(*inputs, policy=law, request=request, enable_gqa=True, **RULES[rule], **options)
    (out * weight).sum().backward()
    found = {"output": out.detach(), "visible": stats.visible, "counts": stats.gap_counts}
    found |= {name: getattr(stats, name) for name in FLOATING}
    found |= {"dq": inputs[0].grad, "dk": inputs[1].grad, "dv": inputs[2].grad}
    return found | {f"parameter {name}": p.grad for name, p in law.named_parameters()}


def places(size: int) -> torch.Tensor:
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    return _HeadTailLoadBalancer(TOKENS, size, "cpu")._generate_indices()


def attention_everywhere(rank: int, mesh: Any) -> dict:
    whole, found = places(2), {}
    own = whole.view(2, -1)[rank].long()
    given = {"gather": own, "ulysses": whole, "ring": TokenShards.of(own[None], mesh, len(own))}
    for policy in POLICIES:
        for rule in RULES:
            for method in METHODS:
                options = {"mesh": mesh, "positions": given[method], "method": method}
                part = attend(context_parallel_attention, policy, rule, own, **options)
                for name, gradient in part.items():
                    if name.startswith("parameter"):
                        distributed.all_reduce(gradient)
                found[policy, rule, method] = part
    return found


CHOSEN_RULES: dict[str, dict[str, Any]] = {
    **RULES,
    "equal keys": {"is_causal": True},
    "a NaN": {"is_causal": True, "window": 7},
    "mask": {"attn_mask": torch.rand(2, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(6)) < 0.1},
    "bias": {"attn_mask": torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(7)).double()},
}
CHOSEN_REQUESTS = {
    "beside others": StatsRequest(winner=True, first_share=3, accumulation="bracket"),
    "alone": StatsRequest(False, False, False, False, winner=True, first_share=TOKENS),
    "sampled": StatsRequest(winner=True, first_share=3, rows=5),
}


def chosen_keys(
    attention: Any, rule: str, request: StatsRequest, own: torch.Tensor, **options: Any
) -> dict[str, torch.Tensor | None]:
    """Winner and weight of the first keys of some rows of a fixed sequence, and the rows."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, heads, TOKENS, DIM, dtype=torch.float64, generator=generator) for heads in (HEADS, 2))
    if rule == "equal keys":  # with one component each, exact under rounding
        size = torch.randint(-2, 3, (2, 2, TOKENS, 1), generator=generator)
        k = size.double() * torch.nn.functional.one_hot(torch.arange(TOKENS) % DIM, DIM)
        q = torch.ones_like(q)
    elif rule == "a NaN":
        k[1, 0, 9] = torch.nan
    rules = {name: x[..., own, :] if name == "attn_mask" else x for name, x in CHOSEN_RULES[rule].items()}
    q, k = q[:, :, own], k[:, :, own]
    stats = attention(q, k, k, enable_gqa=True, policy="log", request=request, **rules, **options).stats
    return {"winner": stats.winner, "share": stats.first_share, "rows": stats.rows, "lse": stats.lse}


def chosen_everywhere(rank: int, mesh: Any) -> dict:
    size = mesh.size()
    own = places(size).view(size, -1)[rank].long()
    return {
        (rule, name, method): chosen_keys(
            context_parallel_attention, rule, request, own, mesh=mesh, positions=own, method=method
        )
        for rule in CHOSEN_RULES
        for name, request in CHOSEN_REQUESTS.items()
        for method in METHODS
        if method != "ulysses" or "attn_mask" not in CHOSEN_RULES[rule]
    }


def masked(attention: Any, own: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients under a learned additive mask shared by all sequences and heads."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, TOKENS, DIM, dtype=torch.float64, generator=generator)[:, :, own] for _ in range(3))
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.float64, generator=generator)[own]
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    out = attention(q, k, v, attn_mask=bias, is_causal=True, policy="log", **options).output
    out.square().sum().backward()
    return {"output": out.detach()} | {
        name: x.grad for name, x in zip(("dq", "dk", "dv", "dbias"), inputs, strict=True)
    }


def masks(rank: int, mesh: Any) -> dict:
    own = places(2).view(2, -1)[rank].long()
    return {
        method: masked(context_parallel_attention, own, mesh=mesh, positions=own, method=method)
        for method in ("gather", "ring")
    }


def dropped(rank: int, mesh: Any) -> dict:
    """Weights after dropout and their gradients: values are unit vectors, so outputs equal weights."""
    own = places(2).view(2, -1)[rank].long()
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 2, TOKENS, DIM, dtype=torch.float64, generator=generator)[:, :, own] for _ in range(2))
    found = {}
    for method in METHODS:
        v = torch.eye(TOKENS, dtype=torch.float64)[own].expand(1, 2, -1, -1).clone()
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(rank)
        options = {"mesh": mesh, "positions": own, "method": method, "is_causal": True}
        out = context_parallel_attention(*inputs, dropout_p=0.4, **options).output
        weights = context_parallel_attention(q, k, v, **options).output
        upstream = torch.randn(2, TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        (out * upstream[None, :, own]).sum().backward()
        found[method] = {"out": out.detach(), "weights": weights, "upstream": upstream, "own": own, "q": q, "k": k}
        found[method] |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), inputs, strict=True)}
    return found


class BytesSent(TorchDispatchMode):
    """Counts the bytes that this process sends in collectives; part of each tensor stays local."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.gathered = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("_c10d_functional::all_gather"):
            self.total += args[0].nbytes  # sent to one other process
            self.gathered = True
        elif name.startswith("_c10d_functional::reduce_scatter"):
            self.total += args[0].nbytes // 2
        elif name.startswith("_c10d_functional::all_to_all"):
            to_others = sum(size for rank, size in enumerate(args[2]) if rank != distributed.get_rank())
            self.total += args[0].nbytes * to_others // sum(args[2])
        return function(*args, **(kwargs or {}))


def bytes_sent(rank: int, mesh: Any) -> dict:
    """Forward and backward bytes of each method in fp32; for a ring with Λ of every row, forward bytes and gathers."""
    shards = TokenShards.of(places(2), mesh, TOKENS // 2)
    found = {}
    for method in METHODS:
        q, k, v = (torch.randn(2, heads, TOKENS // 2, DIM, requires_grad=True) for heads in (HEADS, 2, 2))
        options = {"policy": "log", "is_causal": True, "enable_gqa": True, "method": method}
        with BytesSent() as forward:
            out = context_parallel_attention(q, k, v, mesh=mesh, positions=shards, **options).output
        with BytesSent() as backward:
            out.sum().backward()
        found[method] = forward.total, backward.total
    for kind, exact in (("bracket", False), ("exact", True)):
        with BytesSent() as sent:
            law = attnscale.build_policy("gap_adaptive", exact=exact)
            context_parallel_attention(q, k, v, mesh=mesh, positions=shards, **(options | {"policy": law}))
        found[kind] = sent.total, sent.gathered
    return found
