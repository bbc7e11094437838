"""From seconds to rows, tables and plots, and the baselines of ratios."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.bench.gpu import providers
from attnscale.bench.gpu.problem import Card, Problem, verify, work_of
from attnscale.bench.gpu.providers import SUITES
from attnscale.bench.gpu.results import COLOURS, ROOFLINE, Result, curves_of, draw, header, lines, rows_of
from attnscale.bench.rows import Row

CPU = torch.device("cpu")
SELF = Problem(2, 4, 2, 128, 128, 64, torch.bfloat16, CPU, "log")
DECODE = Problem(3, 8, 2, 1, 1000, 128, torch.float16, CPU, "log")
SMALL = Problem(2, 2, 1, 17, 17, 8, torch.float32, CPU, "log")


@pytest.mark.parametrize(
    ("problem", "mode", "flops"),
    [
        (SELF, "forward", 16_777_216),  # 4·2·4·128·128·64 / 2
        (SELF, "backward", 41_943_040),
        (SELF, "forward+backward", 58_720_256),
        (DECODE, "forward", 12_288_000),  # 4·3·8·1·1000·128, nothing hidden
        (replace(SELF, dim=128), "forward", 33_554_432),
        (replace(SELF, queries=256, keys=256), "forward", 67_108_864),
    ],
)
def test_operations_are_those_counted_by_hand(problem: Problem, mode: str, flops: int) -> None:
    assert work_of(problem, mode).flops == flops


@pytest.mark.parametrize(
    ("problem", "mode", "numbers", "size"),
    [
        # q and out of 2·4·128·64·2 = 131072 bytes, k and v of half as many heads
        (SELF, "forward", 0, 2 * 131_072 + 2 * 65_536),
        (SELF, "forward", 3, 393_216 + 3 * 4 * 1024),
        # q, out, dout, dq · k, v, dk, dv · one number for each of 2·4·128 rows
        (SELF, "backward", 0, 4 * 131_072 + 4 * 65_536 + 4 * 1024),
        (SELF, "forward+backward", 2, 393_216 + 8192 + 790_528),
        (DECODE, "forward", 0, 2 * 3 * 8 * 128 * 2 + 2 * 3 * 2 * 1000 * 128 * 2),
        (replace(SELF, dtype=torch.float32), "forward", 0, 786_432),
    ],
)
def test_traffic_is_that_counted_by_hand(problem: Problem, mode: str, numbers: int, size: int) -> None:
    assert work_of(problem, mode, numbers).bytes == size


def test_the_roofline_is_the_lower_of_arithmetic_and_memory() -> None:
    card = Card(tflops=100, bandwidth=1000)
    long, decode = replace(SELF, queries=8192, keys=8192), work_of(DECODE, "forward")
    assert card.attainable(work_of(long, "forward")) == 100
    assert card.attainable(decode) == pytest.approx(decode.flops / decode.bytes)  # 1000 GB/s: intensity / 1000 TFLOP/s


def metrics(rows: list[Row], provider: str) -> dict[str, tuple[float, float, float]]:
    return {row.metric: (row.y, row.low, row.high) for row in rows if row.provider == provider}


LABELS = ("config", "device", "version")


def measured_rows(card: Card | None = None, problem: Problem = SELF, baselines: tuple[str, ...] = ("a",)) -> list[Row]:
    results = [
        Result("a", [1e-6, 2e-6, 4e-6], 3 * 2**20, 0.5),
        Result("b", [3e-6, 3e-6, 4e-6], None, 0.25, row_numbers=3),
    ]
    return rows_of("attention", "forward", problem, results, baselines, card, LABELS)


def test_rows_say_time_speed_traffic_memory_error_and_ratio() -> None:
    rows = measured_rows()
    first, second = metrics(rows, "a"), metrics(rows, "b")
    assert first["us"] == pytest.approx((2.0, 1.5, 3.0))
    assert first["tflops"] == pytest.approx((16.777216 / 2, 16.777216 / 3, 16.777216 / 1.5))
    assert first["gb_per_s"][0] == pytest.approx(393_216 / 2e-6 / 1e9)
    assert first["gb"] == pytest.approx((393_216 / 1e9,) * 3)
    assert second["gb"][0] == pytest.approx((393_216 + 12_288) / 1e9)
    assert first["peak_mb"] == (3.0, 3.0, 3.0)
    assert first["error_share"] == (0.5, 0.5, 0.5)
    assert "peak_mb" not in second
    # Of each round by itself: 3, 1.5 and 1.
    assert second["time_over_a"] == pytest.approx((1.5, 1.25, 2.25))
    assert first["time_over_a"] == (1.0, 1.0, 1.0)
    assert {(row.kernel, row.mode, row.x, row.config, row.device, row.version) for row in rows} == {
        ("attention", "forward", 128, *LABELS)
    }


def test_the_share_of_the_roofline_needs_a_known_card_and_half_precision() -> None:
    card = Card(tflops=20, bandwidth=1e6)
    found = metrics(measured_rows(card), "a")["roofline_share"]
    assert found == pytest.approx((16.777216 / 2 / 20, 16.777216 / 3 / 20, 16.777216 / 1.5 / 20))
    assert "roofline_share" not in metrics(measured_rows(), "a")
    assert "roofline_share" not in metrics(measured_rows(card, replace(SELF, dtype=torch.float32)), "a")


def test_the_baseline_is_the_fastest_that_ran() -> None:
    # Medians of 2 and 3 µs; "c" did not run.
    assert "time_over_a" in metrics(measured_rows(baselines=("c", "b", "a")), "b")
    assert "time_over_b" in metrics(measured_rows(baselines=("c", "b")), "a")
    assert not [row for row in measured_rows(baselines=("c",)) if row.metric.startswith("time_over")]


def test_rivals_are_torchs_fast_kernels_flex_and_both_versions_of_flash_attn() -> None:
    rivals = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flash_attn_2", "flash_attn_3", "flex")
    assert SUITES["attention"].baselines == SUITES["decode"].baselines == rivals


def test_flash_attn_is_called_with_heads_after_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        assert query.shape[2] == 2  # heads
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    def with_lse(*arguments: Tensor, causal: bool) -> tuple[Tensor, None]:
        return function(*arguments, causal=causal), None

    for provider, module, called in zip(
        providers.FLASH_ATTN, ("flash_attn", "flash_attn_interface"), (function, with_lse), strict=True
    ):
        assert provider.why_not(SMALL, False) == f"{module} is not installed"
        package = SimpleNamespace(flash_attn_func=called, flash_attn_with_kvcache=called)
        monkeypatch.setitem(sys.modules, module, package)  # type: ignore[arg-type]
        for problem in (SMALL, replace(SMALL, queries=1)):
            assert verify(provider, problem, backward=False).right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_eager_attention_multiplies_in_the_dtype_of_its_inputs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(SMALL, dtype=dtype)
    seen: list[torch.dtype] = []
    multiply = Tensor.__matmul__

    def watched(a: Tensor, b: Tensor) -> Tensor:
        seen.extend((a.dtype, b.dtype))
        return multiply(a, b)

    monkeypatch.setattr(Tensor, "__matmul__", watched)
    output = providers.EAGER.prepare(problem)(*problem.inputs(backward=False).leaves).output
    assert set(seen) == {dtype} == {output.dtype}
    assert verify(providers.EAGER, problem, backward=True).right
    assert verify(providers.EAGER_STATISTICS, problem, backward=False).right


def test_the_matrix_of_scores_is_not_tried_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    fits = Problem(16, 16, 16, 1024, 1024, 64, torch.bfloat16, torch.device("cuda"), "log")
    assert providers.EAGER.why_not(fits, True) is None
    large = replace(fits, batch=1, queries=16384, keys=16384)
    assert "16 GiB" in providers.EAGER.why_not(large, True)


def test_the_table_of_a_gpu_shows_speeds_and_leaves_an_unknown_roofline_empty() -> None:
    columns = header(dry_run=False)
    rows = [replace(row, config=SELF.label) for row in measured_rows(Card(20, 1e6))]
    first, second = (dict(zip(columns, line, strict=True)) for line in lines(rows, dry_run=False))
    assert (first["n"], first["provider"], first["config"]) == ("128", "a", "D=64 bfloat16")
    assert (first["µs"], first["TFLOP/s"], first["roof"], first["MB"]) == ("2.0", "8.4", "42%", "3")
    assert (second["over"], second["error"], second["MB"]) == ("1.50", "0.25", "")
    unknown = next(lines([replace(row, config=SELF.label) for row in measured_rows()], dry_run=False))
    assert dict(zip(columns, unknown, strict=True))["roof"] == ""


def test_curves_hold_the_quartiles_and_the_roofline() -> None:
    names = {"a": "attnscale", "b": "flex"}
    named = [replace(row, provider=names[row.provider]) for row in measured_rows(Card(20, 1e6))]
    curves = {curve.name: curve for curve in curves_of(named, "tflops")}
    assert list(curves) == ["attnscale", "flex", ROOFLINE]
    assert curves["attnscale"].y == pytest.approx([16.777216 / 2])
    assert curves[ROOFLINE].y == pytest.approx([20.0])
    assert [curve.name for curve in curves_of(named, "time_over_a")] == ["attnscale", "flex"]


def test_every_provider_has_a_colour_and_a_name_of_its_own() -> None:
    for suite in SUITES.values():
        names = [provider.name for provider in suite.providers]
        assert len(set(names)) == len(names)
        assert set(names) <= set(COLOURS)
        assert len({COLOURS[name] for name in names}) == len(names)


def test_nothing_is_drawn_of_what_was_not_measured(tmp_path: Path) -> None:
    assert draw([], tmp_path / "plots") == []
