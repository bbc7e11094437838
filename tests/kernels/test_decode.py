"""Decode attention: split over the keys and merged.

Newly allocated memory is filled with NaN (or the largest integer), so that unwritten elements show.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected, fused
from oracle import assert_within_budget, torch_error
from torch import Tensor

from attnscale_kernels.decode.launch import decode, decode_launches
from attnscale_kernels.decode.op import decode_attention, decode_op
from attnscale_kernels.flash.launch import flash_forward
from attnscale_kernels.launch import Forward, Tile
from attnscale_kernels.operators import FlatAttention
from attnscale_kernels.visibility import Visibility

TILE = Tile(16, 64, 4, 1)
SMALL = Tile(16, 16, 4, 1)
STATISTICS = ("lse", "max_logit", "entropy")
ORDERS = 16


@pytest.fixture(autouse=True)
def _poisoned():
    torch.use_deterministic_algorithms(True)  # fills new memory
    with corrected():
        yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = normal(batch, heads, queries, dim, dtype=dtype)
    k = normal(batch, kv_heads, keys, dim, seed=1, dtype=dtype)
    v = normal(batch, kv_heads, keys, value_dim, seed=2, dtype=dtype)
    return q, k, v, 0.5 + 2 * torch.rand(batch, heads, queries, generator=torch.Generator().manual_seed(3))


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(visibility: Visibility, queries: int, keys: int) -> tuple[Tensor, Tensor | None]:
    """The visibility [B|1, H|1, Tq, Tk] and the bias, from the definitions of the rules."""
    own, slots = visibility.slot + torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if visibility.left is not None:
        seen = seen & (slots >= own - visibility.left)
    if visibility.right is not None:
        seen = seen & (slots <= own + visibility.right)
    if visibility.start is not None and visibility.stop is not None:
        start, stop = (bound[:, None, :, None] for bound in (visibility.start, visibility.stop))
        seen = (slots >= start) & (slots < stop)
    if visibility.padding is not None:
        seen = seen & ~visibility.padding[:, None, None, :]
    if visibility.mask is None:
        return seen, None
    if visibility.mask.dtype == torch.bool:
        return seen & visibility.mask, None
    return seen & (visibility.mask > -1e4), visibility.mask


def written_out(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, visibility: Visibility, scale: float, softcap=None, sinks=None,
    dtype: torch.dtype = torch.float64,
) -> Forward:  # fmt: skip
    """Naive attention with its statistics, in a given dtype."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    seen, bias = table(visibility, q.shape[2], k.shape[2])
    raw = scale * q @ k.mT
    raw = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    raw = raw if bias is None else raw + bias.to(dtype)
    logits = (raw * beta.to(dtype)[..., None]).masked_fill(~seen, -math.inf)
    sink = logits.new_full((*logits.shape[:3], 1), -math.inf)
    if sinks is not None:
        sink.copy_(sinks[:, None, None])
    extended = torch.cat([logits, sink], -1)
    lse = extended.logsumexp(-1)
    weights = torch.exp(extended - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    entropy = torch.special.entr(weights).sum(-1)
    return Forward(weights[..., :-1] @ v, lse, logits.amax(-1), entropy)


def assert_right(found: Forward, q, k, v, beta, visibility, *, scale, softcap=None, sinks=None) -> None:
    """The output is within twice torch's own error, statistics within that of the same formulas in fp32.

    With few rows these errors may be small by chance. That of torch is therefore the largest over several orders of the
    keys and of the head dimension, and statistics get at least two roundings of the largest logit.
    """
    arguments = (q, k, v, beta, visibility, scale, softcap, sinks)
    true, own = written_out(*arguments), written_out(*arguments, dtype=torch.float32)
    seen = table(visibility, q.shape[2], k.shape[2])[0]
    own_out = max(torch_error(*given, gqa=True)["out"] for given in reordered(q, k, v, beta, seen, scale))
    assert found.out.dtype == q.dtype
    assert_within_budget({"out": found.out}, {"out": true.out}, {"out": own_out}, 2.0)
    empty = true.lse == -math.inf
    assert torch.equal(found.lse == -math.inf, empty)
    assert torch.equal(found.max_logit == -math.inf, true.max_logit == -math.inf)
    least = (
        2 * torch.finfo(torch.float32).eps * true.max_logit.where(true.max_logit > -math.inf, 0.0).abs().max().item()
    )
    for name in STATISTICS:
        got, expected, plain = (getattr(x, name) for x in (found, true, own))
        finite = expected != -math.inf
        error = max((plain - expected).where(finite, 0.0).square().mean().sqrt().item(), least)
        assert got.dtype == torch.float32
        assert_within_budget({name: got.where(finite, 0.0)}, {name: expected.where(finite, 0.0)}, {name: error}, 2.0)


def reordered(q, k, v, beta, seen, scale) -> Iterator[tuple[Tensor, ...]]:
    """Arguments of `torch_error` for the same attention, its keys and its head dimension in several orders."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(ORDERS):
        keys, dims = (torch.randperm(x, generator=generator) for x in k.shape[2:])
        mask = seen if seen.shape[-1] == 1 else seen[..., keys]
        yield q[..., dims], k[:, :, keys][..., dims], v[:, :, keys], beta * scale * math.sqrt(q.shape[-1]), mask


def check(q, k, v, beta, visibility, *, splits, tile=TILE, scale=0.25, **options) -> Forward:
    found = decode(q, k, v, beta, visibility, scale=scale, entropy=True, splits=splits, tile=tile, **options)
    assert_right(found, q, k, v, beta, visibility, scale=scale, **options)
    return found


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 129, 257])
def test_every_length_and_number_of_splits(keys, splits):
    check(*inputs(1, 2, 1, 1, keys, 40, 24), Visibility(), splits=splits)


def test_more_splits_than_are_merged_at_once():
    q, k, v, beta = inputs(1, 2, 1, 1, 330, 16, 16)
    k *= torch.linspace(0.5, 2.0, 330)[:, None]  # puts the maximum among the last keys
    check(q, k, v, beta, Visibility(), splits=21, tile=SMALL)


@pytest.mark.parametrize("keys", [1, 65, 257])
def test_half_precision(keys):
    check(*inputs(1, 3, 1, 1, keys, 64, 64, torch.float16), Visibility(), splits=3)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("dim", "value_dim"), [(40, 64), (64, 80), (80, 128), (128, 40)])
def test_groups_and_head_dimensions(group, dim, value_dim):
    queries = 3 if dim == 64 else 1
    q, k, v, beta = inputs(1, 2 * group, 2, queries, 70, dim, value_dim)
    check(q, k, v, beta, Visibility(slot=70 - queries, right=0), splits=2)


def test_more_rows_than_a_tile_holds():
    q, k, v, beta = inputs(1, 8, 1, 3, 40, 16, 16)  # 24 rows in tiles of 16
    check(q, k, v, beta, Visibility(slot=37, right=0), splits=2)


KEYS = 75
FEATURES: dict[str, tuple[Visibility, dict]] = {
    "causal": (Visibility(slot=KEYS - 2, right=0), {}),
    "window": (Visibility(slot=KEYS - 2, left=4, right=0), {}),
    "wide_window": (Visibility(slot=40, left=35, right=20), {}),
    "lengths": (Visibility(start=int32([0, 0], [0, 0]), stop=int32([32, 33], [74, 75])), {}),
    "intervals": (Visibility(start=int32([17, 3], [0, 0]), stop=int32([60, 65], [20, 2])), {}),
    "padding": (Visibility(padding=torch.arange(KEYS).expand(2, -1) < torch.tensor([[40], [0]])), {}),
    "mask": (Visibility(mask=normal(2, 1, 2, KEYS, seed=5) > 0.3), {}),
    "mask_of_heads": (Visibility(slot=KEYS - 2, right=0, mask=normal(1, 4, 2, KEYS, seed=5) > 0), {}),
    "bias": (Visibility(mask=normal(2, 4, 2, KEYS, seed=6).masked_fill(normal(2, 4, 2, KEYS) > 1, -math.inf)), {}),
    "softcap": (Visibility(slot=KEYS - 2, right=0), {"softcap": 1.5}),
    "sinks": (Visibility(slot=KEYS - 2, right=0), {"sinks": torch.tensor([0.5, -1.0, 6.0, 0.0])}),
    "everything": (
        Visibility(
            start=int32([0, 1], [2, 2]), stop=int32([50, 51], [74, 75]), padding=torch.arange(KEYS)[None] % 5 == 0,
            mask=normal(1, 4, 2, KEYS, seed=7),
        ),
        {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature):
    visibility, options = FEATURES[feature]
    q, k, v, beta = inputs(2, 4, 2, 2, KEYS, 24, 24)
    beta[:, 1] *= -1
    check(q, k, v, beta, visibility, splits=3, tile=Tile(16, 32, 4, 1), **options)


@pytest.mark.parametrize("feature", ["intervals", "everything"])
def test_features_in_half_precision(feature):
    visibility, options = FEATURES[feature]
    q, k, v, beta = inputs(2, 4, 2, 2, KEYS, 24, 24, torch.float16)
    check(q, k, v, beta, visibility, splits=2, **options)


@pytest.mark.parametrize("feature", ["causal", "intervals", "everything"])
def test_bfloat16_and_fused_products(feature):
    visibility, options = FEATURES[feature]
    q, k, v, beta = inputs(2, 4, 2, 2, KEYS, 24, 24, torch.bfloat16)
    with fused():
        check(q, k, v, beta, visibility, splits=2, tile=Tile(16, 32, 4, 1), **options)


@pytest.mark.parametrize("feature", ["wide_window", "bias", "everything"])
def test_it_is_the_flash_forward(feature):
    visibility, options = FEATURES[feature]
    q, k, v, beta = inputs(2, 4, 2, 2, KEYS, 24, 40)
    found = decode(q, k, v, beta, visibility, scale=0.3, entropy=True, splits=4, tile=SMALL, **options)
    expected = flash_forward(q, k, v, beta, visibility, scale=0.3, entropy=True, tile=Tile(16, 64, 4, 1), **options)
    for name in ("out", *STATISTICS):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6, msg=name)


def test_what_is_not_asked_for_is_not_there():
    q, k, v, beta = inputs(1, 1, 1, 1, 20, 16, 16)
    found = decode(q, k, v, beta, Visibility(), scale=0.25, tile=TILE)
    full = decode(q, k, v, beta, Visibility(), scale=0.25, entropy=True, tile=TILE)
    assert found.entropy is None
    assert all(torch.equal(getattr(found, name), getattr(full, name)) for name in ("out", "lse", "max_logit"))


def test_extreme_temperatures_keep_hidden_keys_out():
    q, k, v, _ = inputs(1, 4, 1, 1, 50, 16, 16)
    beta = torch.tensor([0.0, 1e4, -1e4, 1e-30]).view(1, 4, 1)
    visibility = Visibility(start=int32([9]), stop=int32([41]))
    found = decode(q, k, v, beta, visibility, scale=0.25, entropy=True, splits=3, tile=SMALL)
    true = written_out(q, k, v, beta, visibility, 0.25)
    torch.testing.assert_close(found.out.double(), true.out, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.entropy.double(), true.entropy, rtol=1e-3, atol=1e-5)


def test_rows_that_see_nothing():
    q, k, v, beta = inputs(2, 2, 1, 2, 40, 16, 16)
    visibility = Visibility(start=int32([0, 0], [7, 3]), stop=int32([0, 0], [7, 33]))
    found = check(q, k, v, beta, visibility, splits=3, tile=SMALL)
    for rows in (found.out[0], found.out[1, :, 0], found.entropy[0]):
        assert not rows.any()
    sinks = torch.tensor([1.5, -3.0])
    found = decode(q, k, v, beta, visibility, scale=0.25, sinks=sinks, entropy=True, splits=2, tile=TILE)
    assert not found.out[0].any()
    assert not found.entropy[0].any()
    torch.testing.assert_close(found.lse[0], sinks[:, None].expand(2, 2))
    nowhere = torch.tensor([-math.inf]).expand(2)
    found = decode(q, k, v, beta, visibility, scale=0.25, sinks=nowhere, entropy=True, splits=2, tile=TILE)
    plain = decode(q, k, v, beta, visibility, scale=0.25, entropy=True, splits=2, tile=TILE)
    assert all(torch.equal(getattr(found, name), getattr(plain, name)) for name in ("out", *STATISTICS))


def test_no_keys_and_no_sequences():
    q, k, v, beta = inputs(1, 2, 1, 1, 0, 16, 16)
    found = decode(q, k, v, beta, Visibility(), scale=1.0, entropy=True, tile=TILE)
    assert not found.out.any()
    assert (found.lse == -math.inf).all()
    found = decode(q[:0], k[:0], v[:0], beta[:0], Visibility(), scale=1.0)
    assert found.out.shape == (0, 2, 1, 16)


@pytest.mark.parametrize("rule", ["bounds", "padding", "mask"])
def test_what_is_hidden_does_not_leak(rule):
    q, k, v, beta = inputs(1, 2, 1, 2, 50, 16, 16)
    seen = torch.zeros(1, 50, dtype=torch.bool)
    seen[:, 5:37] = True
    visibility = {
        "bounds": Visibility(start=int32([5, 5]), stop=int32([37, 37])),
        "padding": Visibility(padding=~seen),
        "mask": Visibility(mask=seen[:, None, None].expand(1, 1, 2, 50)),
    }[rule]
    clean = check(q, k, v, beta, visibility, splits=2, tile=SMALL)
    k[:, :, ~seen[0]] = math.nan
    v[:, :, ~seen[0]] = math.nan
    v[:, :, 38:] = math.inf
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        spoilt = decode(q, k, v, beta, visibility, scale=0.25, entropy=True, splits=2, tile=SMALL)
    assert all(torch.equal(getattr(clean, name), getattr(spoilt, name)) for name in ("out", *STATISTICS))


def test_what_is_broken_spoils_the_rows_that_see_it_and_no_other():
    q, k, v, beta = inputs(1, 2, 1, 2, 50, 16, 16)
    v[0, 0, 40] = math.nan
    visibility = Visibility(start=int32([0, 0]), stop=int32([50, 40]))
    found = decode(q, k, v, beta, visibility, scale=0.25, entropy=True, splits=2, tile=SMALL)
    assert found.out[:, :, 0].isnan().all()
    assert found.out[:, :, 1].isfinite().all()
    assert found.lse[:, :, 0].isnan().all()
    assert found.entropy[:, :, 1].isfinite().all()


def test_caches_of_any_layout():
    q, k, v, beta = inputs(2, 2, 2, 1, 40, 24, 24)
    expected = decode(q, k, v, beta, Visibility(), scale=0.2, splits=2, tile=TILE)
    layouts = {
        "tokens first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        "last axis strided": [x.mT.contiguous().mT for x in (q, k, v)],
        "part of more": [torch.cat([x, torch.full_like(x, math.nan)], -1)[..., :24] for x in (q, k, v)],
    }
    for name, qkv in layouts.items():
        found = decode(*qkv, beta, Visibility(), scale=0.2, splits=2, tile=TILE)
        assert torch.equal(found.out, expected.out), name
    shared = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    found = decode(q, *shared, beta[:, :1, :1], Visibility(), scale=0.2, splits=2, tile=TILE)
    true = written_out(q, *shared, beta[:, :1].expand(2, 2, 1), Visibility(), 0.2)
    torch.testing.assert_close(found.out.double(), true.out, rtol=1e-5, atol=1e-5)


def test_offsets_beyond_31_bits():
    # Never touched, so never allocated: the memory of a cache with 2³¹ elements.
    pool = torch.from_numpy(np.empty(2**31 + 2**12, dtype=np.float16))
    q, k, _, beta = inputs(1, 1, 1, 1, 32, 16, 16, torch.float16)
    apart = pool.as_strided((1, 1, 32, 16), (0, 0, 2**31 // 31, 1))
    apart.copy_(k)
    found = decode(q, apart, apart, beta, Visibility(), scale=0.25, splits=1, tile=TILE)
    expected = decode(q, k, k, beta, Visibility(), scale=0.25, splits=1, tile=TILE)
    assert torch.equal(found.out, expected.out)


def splits_of(sequences, keys):
    """The chosen splits, for an A100 and tiles of 16 keys."""
    q, k, _, beta = inputs(sequences, 1, 1, 1, keys, 16, 16)
    (split, *_), _ = decode_launches(q, k, k, beta, Visibility(), scale=1.0, tile=SMALL)
    return split.arguments["splits"]


def test_the_number_of_splits_fills_the_device_and_no_more():
    assert splits_of(sequences=1, keys=16) == 1
    assert splits_of(sequences=8, keys=16 * 100) == 2 * 108 // 8
    assert splits_of(sequences=8, keys=16 * 20) == 10  # two tiles each
    assert splits_of(sequences=1, keys=16 * 400) == 128
    assert splits_of(sequences=300, keys=16 * 20) == 1
    assert splits_of(sequences=0, keys=0) == 1


def test_splits_and_tile_are_chosen_where_not_told():
    q, k, v, beta = inputs(1, 2, 1, 1, 300, 16, 16, torch.float16)
    found = decode(q, k, v, beta, Visibility(), scale=0.25, entropy=True)
    assert_right(found, q, k, v, beta, Visibility(), scale=0.25)


@pytest.mark.parametrize(("entropy", "winner"), [(True, True), (False, False), (False, True)])
def test_operators_pass_opcheck(entropy, winner):
    torch.use_deterministic_algorithms(False)
    q, k, v, beta = inputs(1, 2, 1, 1, 40, 16, 24)
    visibility = Visibility(start=int32([0]), stop=int32([33]))
    flat = FlatAttention.of(q, k, v, beta, visibility, scale=0.25, softcap=None)
    torch.library.opcheck(decode_op, (*flat, entropy, winner, 1))


def test_operators_compile_into_one_graph_and_pass_everything_on():
    torch.use_deterministic_algorithms(False)
    q, k, v, beta = inputs(1, 2, 1, 1, 40, 16, 24)
    sinks, bias, padding = torch.tensor([0.5, 1.0]), normal(1, 1, 1, 40, seed=8), torch.arange(40)[None] % 7 == 0
    visibility = Visibility(slot=38, left=30, right=1, padding=padding, mask=bias)
    options = {"scale": 0.25, "softcap": 2.0, "sinks": sinks, "entropy": True, "winner": True, "splits": 1}

    def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Forward:
        return decode_attention(q, k, v, beta, visibility, **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, beta)
    expected = decode(q, k, v, beta, visibility, **options)
    assert all(torch.equal(x, y) for x, y in zip(compiled, expected, strict=True))


def test_operators_refuse_gradients():
    q, k, v, beta = inputs(1, 1, 1, 1, 20, 16, 16)
    beta.requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient"):
        decode_attention(q, k, v, beta, Visibility(), scale=0.25)
    with torch.no_grad():
        assert decode_attention(q, k, v, beta, Visibility(), scale=0.25).out.isfinite().all()
