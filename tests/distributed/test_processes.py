"""What two processes compute together, in one pair of them: attention, estimates, shards, checkpoints, messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parallel_model import HEADS, Run, batch, build
from ranks import join, on_ranks, on_two_ranks
from same_records import assert_same
from spread_attention import (
    CHOSEN_REQUESTS,
    CHOSEN_RULES,
    DIM,
    METHODS,
    POLICIES,
    RULES,
    TOKENS,
    attend,
    attention_everywhere,
    bytes_sent,
    chosen_everywhere,
    chosen_keys,
    dropped,
    masked,
    masks,
    places,
)
from spread_training import (
    BY_QUERY,
    SHARDED,
    checkpoints,
    half_precision,
    messages,
    safetensors,
    skipped_layers,
    tensor_parallel,
    train_by_query,
)
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import attnscale
from attnscale import ArgumentError, ArgumentTypeError, BackendError, StatsRequest, attention_with_stats
from attnscale.cli.parallel_cost import ShardedAttention
from attnscale.diagnostics import Record
from attnscale.distributed import ContextParallel, HeadParallel, context_parallel_attention, share_rows
from attnscale.statistics.gaps import Spectrum
from attnscale.statistics.rows import measures


def everything(rank: int) -> dict:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {
        "attention": attention_everywhere(rank, mesh),
        "chosen keys": chosen_everywhere(rank, mesh),
        "masks": masks(rank, mesh),
        "dropped": dropped(rank, mesh),
        "tensor parallel": tensor_parallel(rank),
        "head parts": head_parts(mesh),
        "bytes": bytes_sent(rank, mesh),
        "messages": messages(rank, mesh),
        "skipped": skipped_layers(rank),
        "half": half_precision(rank, mesh),
        "checkpoints": checkpoints(rank),
        "safetensors": safetensors(rank),
    }


def head_parts(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Which part of the heads a module has under both ways to split them, applied in both orders."""
    parts = []
    for styles in ([HeadParallel(), ContextParallel("ulysses")], [ContextParallel("ulysses"), HeadParallel()]):
        attention = attnscale.ScaledDotProductAttention("log")
        for style in styles:
            parallelize_module(attention, mesh, style)
        parts.append(attention.head_part)
    return parts


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


def on_four(rank: int) -> dict:
    return chosen_everywhere(rank, init_device_mesh("cpu", (4,)))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return on_ranks(on_four, tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("rule", CHOSEN_RULES)
@pytest.mark.parametrize("name", CHOSEN_REQUESTS)
def test_winner_and_first_share_of_a_spread_sequence_are_those_of_the_whole(rule, name, ranks, four_ranks):
    request = replace(CHOSEN_REQUESTS[name], rows=None)
    whole = chosen_keys(attention_with_stats, rule, request, torch.arange(TOKENS), backend="reference")
    for size, group in ((2, [rank["chosen keys"] for rank in ranks]), (4, four_ranks)):
        for own, rank in zip(places(size).view(size, -1).long(), group, strict=True):
            for method in METHODS:
                found, where = rank.get((rule, name, method)), f"{method} in {size} processes"
                if found is None:
                    assert method == "ulysses", where  # which takes no mask
                    continue
                assert (found["lse"] is None) == (name == "alone"), where
                assert (found["rows"] is None) == (name != "sampled"), where
                rows = own if found["rows"] is None else own[found["rows"]]
                assert torch.equal(found["winner"], whole["winner"][:, :, rows]), where
                share = whole["share"][:, :, rows]
                torch.testing.assert_close(found["share"], share, rtol=1e-10, atol=1e-12, equal_nan=True, msg=where)


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
        for part in ("first", "state"):
            for name, value in expected[part].items():
                torch.testing.assert_close(found[part][name], value, rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-10)
        records, others = ([Record.from_dict(record) for record in run["records"]] for run in (found, expected))
        assert [record.head for record in records] == 2 * list(range(HEADS))
        assert_same(records, others, tolerance=1e-5)


@pytest.mark.parametrize(("mode", "policy"), BY_QUERY)
def test_a_temperature_from_the_query_is_trained_as_in_one_process(mode, policy, ranks):
    expected = train_by_query("alone", policy)
    for rank in ranks:
        found = rank["tensor parallel"][mode, policy]
        for part in ("first", "state"):
            for name, value in expected[part].items():
                torch.testing.assert_close(found[part][name], value, rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-10)
    gradients = [value for name, value in expected["first"].items() if "policy" in name]
    assert all((gradient != 0).any() for gradient in gradients)


def test_heads_that_are_spread_unsaid_are_right_or_refused_with_what_to_pass(ranks):
    right = build("log")(batch(0)[0], torch.arange(16)).detach()
    for rank in ranks:
        found = rank["tensor parallel"]
        for policy in ("ssmax", "gap_adaptive", "per_head", "asentmax", "qassmax"):
            assert "attnscale.distributed.HeadParallel() in the plan" in found[policy, "unsaid"]
        torch.testing.assert_close(found["log", "unsaid"], right, rtol=0, atol=1e-10)
        said, taps = found["monitor"]
        assert "HeadParallel" in said
        assert "process_group" in said
        assert taps == [None]
        assert "query as a DTensor" in found["dtensor"]
        assert found["shape"] == [1, 2, 8, 4]


def test_statistics_of_spread_heads_carry_their_numbers_and_are_not_merged(ranks):
    for rank in ranks:
        assert rank["tensor parallel"]["heads"] == [[0, 2], [2, 4]]
        assert "statistics of the heads 0 … 1 and of 2 … 3 of a layer" in rank["tensor parallel"]["merged"]


def test_the_plan_counts_the_bytes_that_are_sent(ranks):
    plan = ShardedAttention(
        length=TOKENS, heads=HEADS, key_heads=2, head_dim=DIM, batch=2, dtype="fp32", processes=2, row_beta=True
    )
    for rank in ranks:
        for cost in plan.costs():
            assert rank["bytes"][cost.method] == (cost.sent_forward, cost.sent_backward)


def test_an_adaptive_policy_lets_keys_go_round_the_ring_twice_more_and_gathers_them_only_to_sort(ranks):
    for rank in ranks:
        forward, _ = rank["bytes"]["ring"]  # of keys, and of values of the same size
        assert rank["bytes"]["bracket"] == (forward + forward, False)
        assert rank["bytes"]["exact"] == (forward + forward // 2, True)


def test_a_report_is_one_message_whose_size_does_not_depend_on_the_length(ranks):
    for rank in ranks:
        for way in ("alone", *METHODS):
            short, long = (rank["messages"][way, length]["steps"] for length in (16, 64))
            assert short == long
            assert [len(sizes) for sizes in short] == [1, 0, 1, 0]  # of the steps that are listened to
            assert len({size for sizes in short for size in sizes}) == 1


def test_listening_to_a_spread_sequence_sends_no_byte_more(ranks):
    for rank in ranks:
        for method in METHODS:
            first, second, third, fourth = rank["messages"][method, 64]["passed"]
            assert first == second == third == fourth > 0


def test_estimates_of_different_layers_are_not_added_up_where_a_process_skips_one(ranks):
    for rank in ranks:
        assert "no LayerDrop" in rank["skipped"]["shared"]
    first, second = (rank["skipped"]["own"] for rank in ranks)
    assert not torch.equal(first, second)


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
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


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
        torch.testing.assert_close(written.model.state_dict()[name], value, rtol=0, atol=1e-10, msg=name)


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

    with pytest.raises(ArgumentError, match="every position 0 … 7 of the sequence exactly once"):
        call(positions=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    with pytest.raises(ArgumentError, match=r"positions.shape"):
        call(positions=torch.arange(5))
    with pytest.raises(ArgumentTypeError, match="mesh="):
        call(mesh="cp")
    with pytest.raises(ArgumentError, match="method='rings'"):
        call(method="rings")
    with pytest.raises(BackendError, match="expected 'auto' or 'blockwise'"):
        call(method="ring", backend="sdpa")
    with pytest.raises(ArgumentError, match="attn_mask is not accepted by method='ulysses'"):
        call(method="ulysses", attn_mask=torch.ones(8, 8, dtype=torch.bool))
    attention = attnscale.ScaledDotProductAttention("log")
    ContextParallel()._apply(attention, mesh)
    with pytest.raises(ArgumentError, match="positions=None is not accepted under context parallelism"):
        attention(q, q, q, is_causal=True)
    with pytest.raises(ArgumentTypeError, match="over="):
        share_rows(attention, "everyone")
    with pytest.raises(ArgumentTypeError, match=r"an attnscale\.ScaledDotProductAttention"):
        HeadParallel()._apply(nn.Linear(2, 2), mesh)


def test_modules_with_projections_of_their_own_are_refused_where_they_cannot_be_spread(mesh):
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    module, x = attnscale.MultiheadAttention(8, 2, batch_first=True, policy="log"), torch.randn(1, 6, 8)
    for style in (HeadParallel(), ContextParallel()):
        with pytest.raises(ArgumentTypeError, match=r"attnscale\.ScaledDotProductAttention between separate"):
            parallelize_module(module, mesh, style)
    for need_weights in (False, True):
        split = context_parallel(mesh, buffers=[x], buffer_seq_dims=[1])
        with split, pytest.raises(BackendError, match="under context parallelism"):
            module(x, x, x, is_causal=True, need_weights=need_weights)
    parallelize_module(module, mesh, {"out_proj": RowwiseParallel()})
    with pytest.raises(BackendError, match="tensor parallelism"):
        module(x, x, x, is_causal=True)


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("kind", ["bracket", "exact"])
def test_a_scale_that_policy_and_request_share_is_measured_once(method, rows, kind, mesh, monkeypatch):
    measured = []
    for name in ("bracket", "find_contact"):
        original = getattr(measures, name)

        def count(x, *others, original=original):
            measured.append((x.best if isinstance(x, Spectrum) else x)[..., 0].numel())
            return original(x, *others)

        monkeypatch.setattr(measures, name, count)
    q = torch.randn(2, 4, 8, 4, dtype=torch.float64)
    options = {"is_causal": True, "policy": {"name": "gap_adaptive", "exact": kind == "exact"}}
    options["request"] = StatsRequest(accumulation=kind, gap_thresholds=(0.5, 1.0), rows=rows)
    expected = attention_with_stats(q, q, q, **options)
    measured.clear()
    found = context_parallel_attention(q, q, q, mesh=mesh, positions=torch.arange(8), method=method, **options)
    assert sum(measured) == 2 * 4 * 8
    torch.testing.assert_close(found.output, expected.output)
    assert torch.equal(found.stats.gap_counts, expected.stats.gap_counts)
    for name in ("accumulation", "criticality", "lse", "at_ceiling"):
        torch.testing.assert_close(getattr(found.stats, name), getattr(expected.stats, name), msg=name)
    other = {"request": StatsRequest(accumulation=kind, min_rank=4, rows=rows)}
    expected = attention_with_stats(q, q, q, **options | other).stats
    found = context_parallel_attention(
        q, q, q, mesh=mesh, positions=torch.arange(8), method=method, **options | other
    ).stats
    torch.testing.assert_close(found.accumulation, expected.accumulation)
    torch.testing.assert_close(found.criticality, expected.criticality)


def test_heads_split_twice_have_the_same_numbers_in_either_order(ranks):
    assert [rank["head parts"] for rank in ranks] == [2 * [(0, 4)], 2 * [(3, 4)]]
