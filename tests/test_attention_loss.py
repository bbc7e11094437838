"""`AttentionLoss`: the parts it adds up, against the written-out formulas, and how it shares a model with others."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import tiny_gpt
import tiny_models
import torch
from ranks import on_two_ranks
from torch import Tensor, nn

import attnscale
from attnscale import ArgumentError, ArgumentTypeError, AttentionLoss, BackendError

TERMS: dict[str, Any] = {"entropy": 0.5, "floor": 0.99, "target": (0.5, 0.7), "z": 0.01, "hinge": 0.2, "bound": -0.1}


def written_out(model: nn.Module, run: Any, *, entropy=0.0, floor=None, target=None, z=0.0, hinge=0.0, bound=None):
    """The loss from the weights and logits of every call, with autograd through torch's own functions."""
    calls: list[Tensor] = []

    def note(module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        q, k, _ = inputs
        scores = q @ k.mT * q.shape[-1] ** -0.5
        n = torch.arange(1, q.shape[-2] + 1)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        calls.append((scores * module.policy(n)[..., None]).masked_fill(hidden, -math.inf))

    modules = [x for x in model.modules() if isinstance(x, attnscale.ScaledDotProductAttention)]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    run()
    for handle in handles:
        handle.remove()
    total = 0.0
    for logits in calls:
        weights, lse = logits.softmax(-1), logits.logsumexp(-1)
        entropies = torch.special.entr(weights + (weights == 0)).sum(-1)
        share = (entropies[..., 1:] / torch.arange(2, logits.shape[-1] + 1).log()).mean((0, 2))
        if target is not None:
            total = total + entropy * (share - torch.tensor(target)).square().mean()
        if floor is not None:
            total = total + entropy * (floor - share).relu().square().mean()
        total = total + z * lse.square().mean()
        if bound is not None:
            total = total + hinge * (logits.amax((0, 2, 3)) - bound).relu().square().mean()
    return total / len(calls)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def step(model: nn.Module, seed: int = 0, **terms: Any) -> tuple[Tensor, list[Tensor]]:
    """The attention loss of a batch, and the gradients of the whole loss."""
    with AttentionLoss(model, **(terms or TERMS)) as loss:
        task, penalty = model.loss(tiny_gpt.batch(seed)), None
        penalty = loss()
        (task + penalty).backward()
    return penalty.detach(), gradients(model)


@pytest.mark.parametrize("terms", [TERMS, {"z": 0.3}, {"entropy": 2.0, "floor": 0.9}, {"hinge": 1.0, "bound": 0.0}])
def test_value_and_gradients_are_those_of_the_formula(terms):
    model = tiny_gpt.build(policy="log")
    value, found = step(model, **terms)
    expected = written_out(model, lambda: model.loss(tiny_gpt.batch()), **terms)
    (model.loss(tiny_gpt.batch()) + expected).backward()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found, gradients(model), rtol=1e-4, atol=1e-6)


def test_the_forward_pass_of_the_model_is_unchanged_and_the_loss_takes_itself_off():
    model = tiny_gpt.build()
    before = model.loss(tiny_gpt.batch()).item()
    attributes = [dict(vars(module)) for module in model.modules()]
    with AttentionLoss(model, **TERMS) as loss:
        assert model.loss(tiny_gpt.batch()).item() == before
    loss.remove()  # again
    after = [dict(vars(module)) for module in model.modules()]
    assert [x.keys() for x in after] == [x.keys() for x in attributes]
    assert not model._forward_pre_hooks
    assert model.loss(tiny_gpt.batch()).item() == before
    with pytest.raises(BackendError, match="no attention call"):
        loss()


def test_checkpointing_counts_no_call_twice():
    model = tiny_gpt.build()
    value, expected = step(model)
    model.recompute = "non-reentrant"
    again, found = step(model)
    assert torch.equal(value, again)
    torch.testing.assert_close(found, expected)
    with AttentionLoss(model, z=1.0) as loss:
        (model.loss(tiny_gpt.batch()) + loss()).backward()
        with pytest.raises(BackendError, match="no attention call"):
            loss()  # nothing is left of the recomputed calls


def test_reentrant_checkpointing_is_refused():
    model = tiny_gpt.build()
    model.recompute = "reentrant"
    with AttentionLoss(model, z=1.0), pytest.raises(BackendError, match="use_reentrant=False"):
        model.loss(tiny_gpt.batch())


def test_accumulated_gradients_are_the_sum_of_those_of_each_batch():
    model = tiny_gpt.build()
    each = [step(model, seed)[1] for seed in (0, 1)]
    with AttentionLoss(model, **TERMS) as loss:
        for seed in (0, 1):
            task = model.loss(tiny_gpt.batch(seed))
            (task + loss()).backward()
    torch.testing.assert_close(gradients(model), [a + b for a, b in zip(*each, strict=True)])


def test_a_forward_pass_discards_the_calls_of_the_one_before():
    model = tiny_gpt.build()
    with AttentionLoss(model, z=1.0) as loss:
        model(tiny_gpt.batch())
        expected = loss().item()
        with torch.no_grad():
            model(tiny_gpt.batch(1))  # a validation pass, whose loss nobody asked for
        model(tiny_gpt.batch())
        assert loss().item() == expected
        with pytest.raises(BackendError, match="no attention call"):
            loss()


def test_a_validation_pass_before_the_loss_is_an_error_and_not_a_loss_without_gradients():
    model = tiny_gpt.build()
    with AttentionLoss(model, z=1.0) as loss:
        model(tiny_gpt.batch())
        with torch.no_grad():
            model(tiny_gpt.batch(1))
            model(tiny_gpt.batch(2))
        with pytest.raises(BackendError, match="after each forward pass"):
            loss()
        model(tiny_gpt.batch())
        assert loss().requires_grad
        with torch.no_grad():
            model(tiny_gpt.batch(1))
        assert loss().item() > 0.0  # of the validation pass: nothing was waiting
        model(tiny_gpt.batch())
        with torch.no_grad():
            model(tiny_gpt.batch(1))
            assert loss().item() > 0.0  # as asked for


def test_a_compiled_model_has_the_same_loss_and_gradients():
    model = tiny_gpt.build()
    value, expected = step(model)
    with AttentionLoss(model, **TERMS) as loss:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        logits = compiled(tiny_gpt.batch()[:, :-1])
        penalty = loss()
        task = nn.functional.cross_entropy(logits.flatten(0, 1), tiny_gpt.batch()[:, 1:].flatten())
        (task + penalty).backward()
    torch.testing.assert_close(penalty.detach(), value)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_a_monitor_on_the_same_model_sees_what_it_sees_alone():
    def records(*, beside: bool) -> list[dict]:
        model = tiny_gpt.build()
        with attnscale.Monitor(model, every=1, rows=None, alerts=None) as monitor:
            loss = AttentionLoss(model, z=0.0, hinge=1.0, bound=1e6) if beside else None
            (model.loss(tiny_gpt.batch()) + (loss() if loss else 0.0)).backward()
            found = [record.as_dict() for record in monitor.step(0)]
            if loss is not None:
                loss.remove()
            model.zero_grad()
            model.loss(tiny_gpt.batch()).backward()  # the tap of the monitor is back
            assert len(monitor.step(1)) == len(found)
        return found

    assert records(beside=True) == records(beside=False)


def test_two_losses_stack_and_come_off_in_any_order():
    model = tiny_gpt.build()
    first, second = AttentionLoss(model, z=1.0), AttentionLoss(model, hinge=1.0, bound=0.0)
    model(tiny_gpt.batch())
    assert first().item() > 0
    assert second().item() > 0
    first.remove()
    model(tiny_gpt.batch())
    assert second().item() > 0
    second.remove()
    assert all(getattr(module, "tap", None) is None for module in model.modules())


def test_a_monitor_that_closes_before_the_loss_leaves_nothing():
    model = tiny_gpt.build()
    with attnscale.Monitor(model, alerts=None):
        loss = AttentionLoss(model, z=1.0)
    model(tiny_gpt.batch())
    assert loss().item() > 0
    loss.remove()
    with attnscale.Monitor(model, alerts=None):
        pass


def test_copies_of_a_model_have_no_loss():
    model = tiny_gpt.build()
    with AttentionLoss(model, z=1.0) as loss:
        other = copy.deepcopy(model)
        other.loss(tiny_gpt.batch()).backward()
        with pytest.raises(BackendError, match="no attention call"):
            loss()
        assert copy.deepcopy(loss) is None


def test_threads_collect_into_one_loss():
    model = tiny_gpt.build()
    with AttentionLoss(model.blocks[0], z=1.0) as loss:
        x = torch.randn(1, 8, 16)
        thread = threading.Thread(target=lambda: model.blocks[0](x))
        thread.start()
        thread.join()
        assert loss().item() > 0


def test_sampled_rows_estimate_the_loss_of_all_rows():
    model = tiny_gpt.build()
    with AttentionLoss(model, z=1.0, rows=5) as sampled, AttentionLoss(model, z=1.0) as exact:
        values = []
        for _ in range(60):
            model(tiny_gpt.batch(length=25))
            values.append(sampled().item())
            true = exact().item()
    assert len(set(values)) > 10  # other rows in other passes
    assert sum(values) / len(values) == pytest.approx(true, rel=0.05)


def test_rows_of_padding_and_rows_without_keys_do_not_count():
    attention = attnscale.ScaledDotProductAttention("constant")
    q = torch.randn(2, 2, 6, 4, requires_grad=True)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    weights = TERMS | {"target": None}
    values = []
    for garbage in (0.0, 50.0):
        with torch.no_grad():
            q[1, :, 4:] = garbage
        with AttentionLoss(attention, **weights) as loss:
            attention(q, q, q, is_causal=True, key_padding=padding)
            values.append(loss())
            (gradient,) = torch.autograd.grad(values[-1], q)
            assert (gradient[1, :, 4:] == 0).all()
    assert values[0].item() == values[1].item()


def test_a_converted_torch_model_trains_with_it():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 2)
    with pytest.raises(ArgumentError, match=r'attnscale.convert\(model, "constant"\)'):
        AttentionLoss(model, z=1.0)
    x = torch.randn(2, 12, 32)
    with attnscale.convert(model, "constant"), AttentionLoss(model, entropy=1.0, target=(0.2, 0.4, 0.6, 0.8)) as loss:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        values = []
        for _ in range(30):
            model(x)
            penalty = loss()
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
            values.append(penalty.item())
    assert values[-1] < 0.3 * values[0]


@pytest.mark.parametrize("applied", [False, True])
def test_a_transformers_model_has_the_gradients_of_the_formula(applied):
    model = tiny_models.llama()
    handle = attnscale.hf.apply(model, "log", reference_length=4) if applied else None
    with AttentionLoss(model, z=1.0) as loss:
        model(input_ids=tiny_models.TOKENS)
        penalty = loss()
        penalty.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found} >= {"q_proj", "k_proj"}
    query = model.model.layers[1].self_attn.q_proj.weight
    values = []
    for sign in (1, -1):  # the directional derivative by differences
        with torch.no_grad():
            query += sign * 1e-6
            with AttentionLoss(model, z=1.0) as loss:
                model(input_ids=tiny_models.TOKENS)
                values.append(loss().item())
            query -= sign * 1e-6
    slope = found["model.layers.1.self_attn.q_proj.weight"].sum().item()
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)
    if handle is not None:
        handle.remove()
    assert not any("attnscale" in module._modules for module in model.modules() if module._modules.get("attnscale"))


def test_padded_batches_of_a_transformers_model_count_real_tokens_only():
    model = tiny_models.llama()
    tokens = tiny_models.TOKENS
    padded = torch.cat([torch.zeros_like(tokens[:, :3]), tokens], dim=1)
    mask = (padded != 0).long()
    values = []
    for inputs in ({"input_ids": tokens}, {"input_ids": padded, "attention_mask": mask}):
        with AttentionLoss(model, z=1.0, entropy=1.0, target=0.5) as loss:
            model(**inputs)
            values.append(loss().item())
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "at least one weight > 0"),
        ({"entropy": 1.0}, "entropy=1.0 is not accepted: expected a number > 0 together with target or floor"),
        ({"floor": 0.5, "z": 1.0}, "entropy=0.0 is not accepted"),
        ({"entropy": 1.0, "floor": 1.5}, "floor=1.5 is not accepted: expected a number in 0 … 1"),
        ({"entropy": 1.0, "target": ()}, r"target=\(\) is not accepted"),
        ({"hinge": 1.0}, "hinge=1.0 is not accepted: expected a number > 0 together with bound"),
        ({"z": -1.0}, "z=-1.0 is not accepted: expected a finite number >= 0"),
        ({"z": 1.0, "rows": 0}, "rows=0 is not accepted"),
    ],
)
def test_bad_arguments_are_rejected_and_leave_the_model_as_it_was(arguments, message):
    model = tiny_gpt.build()
    with pytest.raises(ArgumentError, match=message):
        AttentionLoss(model, **arguments)
    assert all(getattr(module, "tap", None) is None for module in model.modules())


def test_a_goal_per_head_needs_as_many_heads():
    model = tiny_gpt.build()
    with AttentionLoss(model, entropy=1.0, target=(0.1, 0.2, 0.3)), pytest.raises(ArgumentError, match="2 heads"):
        model(tiny_gpt.batch())


def test_models_without_attention_of_ours_are_rejected():
    with pytest.raises(ArgumentError, match=r"attnscale.convert"):
        AttentionLoss(nn.Linear(2, 2), z=1.0)
    with pytest.raises(ArgumentTypeError, match="model"):
        AttentionLoss("model", z=1.0)


def spread(rank: int) -> dict[str, list[Tensor]]:
    """Two steps of a model under DDP and FSDP2, on half a batch each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh("cpu", (2,)), {}
    for mode in ("ddp", "fsdp2"):
        for recompute in (None, "non-reentrant"):
            model = tiny_gpt.build()
            model.recompute = recompute
            wrapped: nn.Module = model
            if mode == "fsdp2":
                for part in (*model.blocks, model):
                    fully_shard(part, mesh=mesh)
            else:
                wrapped = nn.parallel.DistributedDataParallel(model)
            with AttentionLoss(wrapped, **TERMS) as loss:
                tokens = tiny_gpt.batch(rank)
                logits = wrapped(tokens[:, :-1])
                penalty = loss()
                task = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (task + penalty).backward()
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            found[f"{mode} {recompute}"] = [penalty.detach(), *(x for x in grads if x is not None)]
    return found


def test_under_ddp_and_fsdp2_gradients_are_the_mean_of_those_of_the_processes(tmp_path):
    alone = [step(tiny_gpt.build(), seed) for seed in (0, 1)]
    expected = [(a + b) / 2 for a, b in zip(alone[0][1], alone[1][1], strict=True)]
    for rank, found in enumerate(on_two_ranks(spread, tmp_path)):
        for penalty, *grads in found.values():
            torch.testing.assert_close(penalty, alone[rank][0])
            torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)
