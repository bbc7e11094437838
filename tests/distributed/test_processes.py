"""What two processes compute together, in one pair of them: attention, estimates, shards, checkpoints, messages."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from parallel_model import HEADS, Model, Run, batch
from ranks import join, on_two_ranks
from same_records import assert_same
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import attnscale
from attnscale import ArgumentError, ArgumentTypeError, BackendError, Monitor, StatsRequest, attention_with_stats
from attnscale.bench.context_plan import ContextPlan
from attnscale.diagnostics import Record
from attnscale.distributed import ContextParallel, HeadParallel, TokenShards, context_parallel_attention, share_rows

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


def masked(attention: Any, own: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients under an additive mask that is one for all sequences and heads, and learned."""
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
    """Weights after dropout and their gradients: values are unit vectors, so that outputs are weights."""
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


def messages(rank: int) -> dict:
    """How often a monitor communicates in a step, and how much, at two lengths."""
    sent: list[int] = []
    gather = distributed.all_gather

    def counted(everywhere: Any, message: torch.Tensor, **options: Any) -> Any:
        sent.append(message.numel())
        return gather(everywhere, message, **options)

    distributed.all_gather = counted
    found = {}
    for length in (16, 64):
        attention = attnscale.ScaledDotProductAttention("log")
        x = torch.randn(1, 2, length, 8, requires_grad=True)
        with Monitor(attention, every=1, rows=8, alerts=None) as monitor:
            for step in range(3):
                attention(x, x, x, is_causal=True).sum().backward()
                sent.clear()
                monitor.step(step)
                found[length, step] = list(sent)
    distributed.all_gather = gather
    return found


class BytesSent(TorchDispatchMode):
    """Adds up what this process sends to others by collectives: each is given a tensor, and some of it stays here."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("_c10d_functional::all_gather"):
            self.total += args[0].nbytes  # to one other process
        elif name.startswith("_c10d_functional::reduce_scatter"):
            self.total += args[0].nbytes // 2
        elif name.startswith("_c10d_functional::all_to_all"):
            to_others = sum(size for rank, size in enumerate(args[2]) if rank != distributed.get_rank())
            self.total += args[0].nbytes * to_others // sum(args[2])
        return function(*args, **(kwargs or {}))


def tensor_parallel(rank: int) -> dict:
    """Training with a policy per head, DTensors as queries, and what is said where the plan has no `HeadParallel`."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found: dict[str, Any] = {"per_head": Run("tp", "per_head", packed=False).train(5)}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    for policy in ("ssmax", "gap_adaptive", "per_head", "log"):
        model = Model(policy).double()
        parallelize_module(model.block, mesh, plan)
        try:
            found[policy, "unsaid"] = model(batch(0)[0], torch.arange(16)).detach()
        except ArgumentError as error:
            found[policy, "unsaid"] = str(error)
    try:
        Monitor(model)
    except ArgumentError as error:
        found["monitor"] = str(error), [module.tap for module in model.modules() if hasattr(module, "tap")]
    Monitor(model, process_group=init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))["dp"]).close()
    attention = attnscale.ScaledDotProductAttention("log")
    heads = DTensor.from_local(torch.ones(1, 2, 8, 4), mesh, [Shard(1)])
    try:
        attention(heads, heads, heads, is_causal=True)
    except BackendError as error:
        found["dtensor"] = str(error)
    HeadParallel()._apply(attention, mesh)
    found["shape"] = list(attention(heads, heads, heads, is_causal=True).shape)
    return found


def bytes_sent(rank: int, mesh: Any) -> dict:
    """Forward and backward of each method, in fp32."""
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
    return found


def half_precision(rank: int, mesh: Any) -> dict:
    """The gradient of a learned policy in a bf16 model, sharded as any other; also one that was kept in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from attnscale.distributed import shard_policies

    found = {}
    for kind in ("alone", "plain", "kept", "mixed"):
        torch.manual_seed(0)
        model = Model("ssmax") if kind == "mixed" else Model("ssmax").to(torch.bfloat16)
        policy, options = model.block.attention.policy, {"mesh": mesh}
        if kind == "kept":
            policy.float()
            shard_policies(model, mesh=mesh)
        if kind == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        rows = slice(None) if kind == "alone" else slice(2 * rank, 2 * rank + 2)
        if kind != "alone":
            fully_shard(model.block, **options)
            fully_shard(model, **options)
        tokens, targets = (x[rows] for x in batch(0))
        logits = model(tokens, torch.arange(tokens.shape[1]))
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        found[kind] = policy.s.grad if kind == "alone" else policy.s.grad.full_tensor()
    return found


SHARDED = [(mode, policy) for mode in ("fsdp2", "tp") for policy in ("ssmax", "gap_adaptive")]


def checkpoints(rank: int) -> dict:
    """Ten steps, a checkpoint, a restart from it, ten more; and twenty in one go."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    found = {}
    for mode, policy in SHARDED:
        folder = f"{os.environ['RANKS_FOLDER']}/{mode}-{policy}"
        run = Run(mode, policy, packed=False)
        run.train(10, monitored=False)
        model, optimizer = get_state_dict(run.model, run.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        again = Run(mode, policy, packed=False)
        model, optimizer = get_state_dict(again.model, again.optimizer)
        saved = {"model": model, "optimizer": optimizer}
        checkpoint.load(saved, checkpoint_id=folder)
        set_state_dict(
            again.model, again.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        restarted = again.train(10, start=10, monitored=False)["state"]
        whole = Run(mode, policy, packed=False).train(20, monitored=False)["state"]
        found[mode, policy] = {"restarted": restarted, "whole": whole}
    return found


def safetensors(rank: int) -> dict:
    """What a file of one process restores in two, by mode and policy; and a file that two write, for one to read."""
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    folder, found = os.environ["RANKS_FOLDER"], {}
    for mode, policy in SHARDED:
        alone = Run("alone", policy, packed=False)
        alone.train(3, monitored=False)
        if rank == 0:
            save_file(alone.model.state_dict(), f"{folder}/alone-{policy}.safetensors")
        distributed.barrier()
        run = Run(mode, policy, packed=False)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_model_state_dict(run.model, load_file(f"{folder}/alone-{policy}.safetensors"), options=options)
        restored = {name: x.clone() for name, x in get_model_state_dict(run.model, options=options).items()}
        run.train(1, start=3, monitored=False)
        written = get_model_state_dict(run.model, options=options)  # whole tensors, on the first process only
        if rank == 0:
            save_file(written, f"{folder}/{mode}-{policy}.safetensors")
        found[mode, policy] = {"restored": restored, "expected": alone.model.state_dict()}
    return found


def everything(rank: int) -> dict:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {
        "attention": attention_everywhere(rank, mesh),
        "masks": masks(rank, mesh),
        "dropped": dropped(rank, mesh),
        "tensor parallel": tensor_parallel(rank),
        "bytes": bytes_sent(rank, mesh),
        "messages": messages(rank),
        "half": half_precision(rank, mesh),
        "checkpoints": checkpoints(rank),
        "safetensors": safetensors(rank),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def ranks(folder):
    return on_two_ranks(everything, folder)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_attention_of_a_spread_sequence_is_that_of_the_whole(policy, rule, ranks):
    whole = attend(attention_with_stats, policy, rule, torch.arange(TOKENS), backend="blockwise")
    for rank, own in zip(ranks, places(2).view(2, -1).long(), strict=True):
        for method in METHODS:
            found = rank["attention"][policy, rule, method]
            for name, expected in whole.items():
                own_part = expected if name.startswith("parameter") else expected[:, :, own]
                exact = name in ("visible", "counts")
                torch.testing.assert_close(
                    found[name], own_part, rtol=0 if exact else 1e-10, atol=0 if exact else 1e-10,
                    msg=lambda m, n=name, how=method: f"{how}, {n}: {m}",
                )  # fmt: skip


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_learned_mask_has_the_gradient_of_one_process(method, ranks):
    whole = masked(attention_with_stats, torch.arange(TOKENS), backend="blockwise")
    for rank, own in zip(ranks, places(2).view(2, -1).long(), strict=True):
        for name, found in rank["masks"][method].items():
            expected = whole[name][own] if name == "dbias" else whole[name][:, :, own]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("method", METHODS)
def test_dropout_drops_weights_of_all_keys_and_has_their_gradient(method, ranks):
    parts = [rank["dropped"][method] for rank in ranks]
    whole = {name: torch.zeros(1, 2, TOKENS, TOKENS, dtype=torch.float64) for name in ("out", "weights")}
    q, k = (torch.zeros(1, 2, TOKENS, DIM, dtype=torch.float64) for _ in range(2))
    for part in parts:
        for name, tensor in (*whole.items(), ("q", q), ("k", k)):
            tensor[:, :, part["own"]] = part[name]
    kept, seen = whole["out"] != 0, whole["weights"] > 0
    torch.testing.assert_close(whole["out"], whole["weights"] * kept / 0.6, rtol=1e-10, atol=1e-12)
    assert 0.5 < kept[seen].double().mean() < 0.7
    # The gradient of softmax(q·k)·kept/0.6, written out.
    upstream = parts[0]["upstream"][None]
    of_weights = upstream * kept / 0.6
    of_scores = whole["weights"] * (of_weights - (of_weights * whole["weights"]).sum(-1, keepdim=True)) * DIM**-0.5
    expected = {"dq": of_scores @ k, "dk": of_scores.mT @ q, "dv": whole["out"].mT @ upstream}
    for part in parts:
        for name, gradient in expected.items():
            torch.testing.assert_close(part[name], gradient[:, :, part["own"]], rtol=1e-9, atol=1e-10, msg=name)


def test_a_policy_per_head_is_that_of_one_process_where_heads_are_spread(ranks):
    expected = Run("alone", "per_head", packed=False).train(5)
    for rank in ranks:
        found = rank["tensor parallel"]["per_head"]
        for part in ("gradients", "state"):
            for name, value in expected[part].items():
                torch.testing.assert_close(found[part][name], value, rtol=0, atol=1e-7, msg=name)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-6)
        records, others = ([Record.from_dict(record) for record in run["records"]] for run in (found, expected))
        assert [record.head for record in records] == 2 * list(range(HEADS))
        assert_same(records, others, tolerance=1e-5)


def test_heads_that_are_spread_unsaid_are_right_or_refused_with_what_to_pass(ranks):
    for rank in ranks:
        found = rank["tensor parallel"]
        for policy in ("ssmax", "gap_adaptive", "per_head"):
            assert "attnscale.distributed.HeadParallel() in the plan" in found[policy, "unsaid"]
        assert torch.equal(found["log", "unsaid"], ranks[0]["tensor parallel"]["log", "unsaid"])
        said, taps = found["monitor"]
        assert "HeadParallel() in the plan of parallelize_module, or the monitor the process_group" in said
        assert taps == [None]
        assert "the heads of this process" in found["dtensor"]
        assert found["shape"] == [1, 2, 8, 4]


def test_the_plan_counts_the_bytes_that_are_sent(ranks):
    plan = ContextPlan(
        length=TOKENS, heads=HEADS, key_heads=2, head_dim=DIM, batch=2, dtype="fp32", processes=2, row_beta=True
    )
    for rank in ranks:
        assert rank["bytes"] == {cost.method: (cost.sent_forward, cost.sent_backward) for cost in plan.costs()}


def test_a_report_is_one_message_whose_size_does_not_depend_on_the_length(ranks):
    for rank in ranks:
        sizes = [rank["messages"][length, step] for length in (16, 64) for step in range(3)]
        assert all(len(sent) == 1 for sent in sizes)
        assert len({sent[0] for sent in sizes}) == 1


def test_a_learned_policy_trains_in_a_sharded_bf16_model_as_any_other_module(ranks):
    for rank in ranks:
        half = rank["half"]
        assert [half[kind].dtype for kind in half] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        for kind in ("plain", "kept", "mixed"):
            torch.testing.assert_close(half[kind].float(), half["alone"].float(), rtol=0.03, atol=1e-4, msg=kind)


def test_a_restart_from_a_checkpoint_goes_on_with_the_same_numbers(ranks):
    for rank in ranks:
        for found in rank["checkpoints"].values():
            for name, expected in found["whole"].items():
                torch.testing.assert_close(found["restarted"][name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is meant here
@pytest.mark.parametrize(("mode", "policy"), SHARDED)
def test_a_checkpoint_of_two_processes_is_one_for_one_process(mode, policy, ranks, folder):
    from torch.distributed import checkpoint

    expected = Run("alone", policy, packed=False).train(10, monitored=False)["state"]
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    checkpoint.load({"model": loaded}, checkpoint_id=folder / f"{mode}-{policy}", no_dist=True)
    tolerance = 1e-7 if policy == "ssmax" else 1e-10
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("mode", "policy"), SHARDED)
def test_a_safetensors_file_goes_from_one_process_to_two_and_back(mode, policy, ranks, folder):
    from safetensors.torch import load_file

    first = ranks[0]["safetensors"][mode, policy]
    assert first["restored"].keys() == first["expected"].keys()
    for name, expected in first["expected"].items():
        torch.testing.assert_close(first["restored"][name], expected, rtol=0, atol=0, msg=name)
    written = Run("alone", policy, packed=False)
    written.model.load_state_dict(load_file(folder / f"{mode}-{policy}.safetensors"))
    run = Run("alone", policy, packed=False)
    run.model.load_state_dict(load_file(folder / f"alone-{policy}.safetensors"))
    run.train(1, start=3, monitored=False)
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(written.model.state_dict()[name], value, rtol=0, atol=1e-7, msg=name)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    join(tmp_path)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    distributed.destroy_process_group()


def test_what_cannot_be_is_refused_with_what_to_pass(mesh):
    q = torch.randn(1, 2, 8, 4)

    def call(**options):
        return context_parallel_attention(q, q, q, **({"mesh": mesh, "positions": torch.arange(8)} | options))

    with pytest.raises(ArgumentError, match="every place 0 … 7 of the sequence once"):
        call(positions=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    with pytest.raises(ArgumentError, match=r"positions.shape"):
        call(positions=torch.arange(5))
    with pytest.raises(ArgumentTypeError, match="mesh="):
        call(mesh="cp")
    with pytest.raises(ArgumentError, match="method='rings'"):
        call(method="rings")
    with pytest.raises(BackendError, match="computed by blockwise"):
        call(method="ring", backend="sdpa")
    with pytest.raises(ArgumentError, match="attn_mask is not accepted by method='ulysses'"):
        call(method="ulysses", attn_mask=torch.ones(8, 8, dtype=torch.bool))
    attention = attnscale.ScaledDotProductAttention("log")
    ContextParallel()._apply(attention, mesh)
    with pytest.raises(ArgumentError, match="positions=None is not accepted under context parallelism"):
        attention(q, q, q, is_causal=True)
    with pytest.raises(ArgumentTypeError, match="over="):
        share_rows(attention, "everyone")
    with pytest.raises(ArgumentTypeError, match="a ScaledDotProductAttention"):
        HeadParallel()._apply(nn.Linear(2, 2), mesh)


def test_sampled_rows_and_masks_are_those_of_one_process(mesh):
    q = torch.randn(2, 2, 8, 4, dtype=torch.float64)
    mask = torch.rand(8, 8) < 0.7
    for method in METHODS:
        rules = {"is_causal": True} if method == "ulysses" else {"attn_mask": mask, "is_causal": True}
        options = {"policy": "log", "request": StatsRequest(rows=3)} | rules
        expected = attention_with_stats(q, q, q, **options)
        found = context_parallel_attention(q, q, q, mesh=mesh, positions=torch.arange(8), method=method, **options)
        torch.testing.assert_close(found.output, expected.output)
        torch.testing.assert_close(found.stats.rows, expected.stats.rows)
        torch.testing.assert_close(found.stats.entropy, expected.stats.entropy)
