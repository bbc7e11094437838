"""The arithmetic of the benchmarks, with a simulated clock."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import attnscale
from attnscale.bench.rows import Quartiles, Row, write_rows
from attnscale.diagnostics import Monitor, Record
from attnscale.errors import ArgumentError
from scripts.cost import measuring
from scripts.cost.__main__ import main
from scripts.cost.attention import FlexAttentionCost
from scripts.cost.measuring import in_both_roles, interleaved_ratio, peak_bytes
from scripts.cost.models import SHAPE, ModelCost
from scripts.cost.monitor import MatrixCost, MonitorCost, build_gpt
from scripts.cost.plan import AttentionCost, ImportCost, Plan, cases, summarise

KIB = 1024


class Clock:
    """Time that passes only inside the functions it creates; `calls` records their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def lasting(self, name: str, *seconds: float) -> Callable[[], None]:
        durations = iter(seconds)

        def function() -> None:
            self.calls.append(name)
            self.now += next(durations)

        return function


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


WARM_UP = (1000.0, 1000.0)


def test_the_ratio_is_the_median_of_the_rounds_with_its_quartiles(clock: Clock) -> None:
    candidate = clock.lasting("candidate", *WARM_UP, 14.0, 2.0, 12.0, 4.0, 10.0, 6.0, 8.0)
    baseline = clock.lasting("baseline", *WARM_UP, *[2.0] * 7)
    assert interleaved_ratio(candidate, baseline, rounds=7) == Quartiles(median=4.0, low=2.0, high=6.0)


def test_a_round_of_pairs_compares_their_sums(clock: Clock) -> None:
    candidate = clock.lasting("candidate", *WARM_UP, 1.0, 5.0, 2.0, 7.0, 3.0, 9.0)
    baseline = clock.lasting("baseline", *WARM_UP, *[1.0, 2.0] * 3)
    assert interleaved_ratio(candidate, baseline, rounds=3, pairs=2) == (3.0, 2.0, 4.0)


def test_each_round_divides_by_its_own_baseline(clock: Clock) -> None:
    # The machine slows down steadily; the ratio is unaffected.
    speeds = [1.0, 2.0, 4.0, 8.0, 16.0]
    candidate = clock.lasting("candidate", *WARM_UP, *(3 * speed for speed in speeds))
    baseline = clock.lasting("baseline", *WARM_UP, *(2 * speed for speed in speeds))
    assert interleaved_ratio(candidate, baseline, rounds=5) == (1.5, 1.5, 1.5)


def test_one_disturbed_round_does_not_move_the_median(clock: Clock) -> None:
    candidate = clock.lasting("candidate", *WARM_UP, 1.0, 1.0, 500.0, 1.0, 1.0)
    baseline = clock.lasting("baseline", *WARM_UP, *[1.0] * 5)
    assert interleaved_ratio(candidate, baseline, rounds=5).median == 1.0


def test_every_round_runs_both_and_neither_is_always_first(clock: Clock) -> None:
    rounds = 20
    functions = [clock.lasting(name, *WARM_UP, *[1.0] * rounds) for name in ("candidate", "baseline")]
    interleaved_ratio(*functions, rounds=rounds)
    warm_up, measured = clock.calls[:4], clock.calls[4:]
    assert sorted(warm_up) == ["baseline"] * 2 + ["candidate"] * 2
    pairs = [tuple(measured[index : index + 2]) for index in range(0, 2 * rounds, 2)]
    assert len(pairs) == rounds
    assert set(pairs) == {("candidate", "baseline"), ("baseline", "candidate")}


def test_peak_bytes_counts_what_is_alive_at_once() -> None:
    def together() -> None:
        first = torch.empty(4 * KIB, dtype=torch.uint8)
        second = torch.empty(8 * KIB, dtype=torch.uint8)
        del first, second

    assert peak_bytes(together) == 12 * KIB


def test_peak_bytes_notices_that_memory_was_freed() -> None:
    def one_after_the_other() -> None:
        first = torch.empty(4 * KIB, dtype=torch.uint8)
        del first
        second = torch.empty(8 * KIB, dtype=torch.uint8)
        del second

    assert peak_bytes(one_after_the_other) == 8 * KIB


def test_peak_bytes_leaves_out_what_was_there_before() -> None:
    inputs = torch.zeros(64 * KIB, dtype=torch.uint8)
    assert peak_bytes(lambda: inputs[: 2 * KIB].clone()) == 2 * KIB


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("law", ["sqrt_log", "log", "log_squared", "llama4", "qwen"])
def test_a_length_law_costs_at_most_one_copy_of_the_query_and_its_temperatures(law: str, backward: bool) -> None:
    assert extra_bytes(law, backward) <= 4 * HEADS * LENGTH * WIDTH + 4 * LENGTH


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
def test_standard_attention_costs_no_memory(backward: bool) -> None:
    assert extra_bytes("constant", backward) == 0


HEADS, LENGTH, WIDTH = 4, 512, 32


def extra_bytes(policy: str, backward: bool) -> int:
    """Additional peak memory of causal attention under a policy over torch's own."""
    shape = (1, HEADS, LENGTH, WIDTH)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    built = attnscale.build_policy(policy)
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)

    def step(attention: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            output = attention()
            if backward:
                torch.autograd.grad(output.sum(), (q, k, v))

        return run

    ours = step(lambda: attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy=built))
    theirs = step(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return peak_bytes(ours) - peak_bytes(theirs)


def row(metric: str = "time_ratio", provider: str = "log", y: float = 1.0, x: int = 512, spread: float = 0.01) -> Row:
    return Row("attention", provider, "forward", metric, x, y, y - spread, y + spread, "H=8, D=64", "cpu", "torch 2.13")


def test_rows_are_written_tidily(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rows.csv"
    write_rows(path, [row(y=1.23456, x=16), row(provider="constant", y=2.0)])
    assert path.read_bytes().decode().count("\r") == 0
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [
        "kernel",
        "provider",
        "mode",
        "metric",
        "x",
        "y",
        "low",
        "high",
        "config",
        "device",
        "version",
    ]
    assert [(line["provider"], line["x"], line["y"]) for line in table] == [
        ("log", "16", "1.2346"),
        ("constant", "512", "2.0000"),
    ]
    assert {line["config"] for line in table} == {"H=8, D=64"}


def test_rows_replace_an_earlier_file_and_leave_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for y in (1.0, 2.0):
        write_rows(path, [row(y=y)])
    assert "2.0000" in path.read_text()
    assert "1.0000" not in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_fail_half_way_leave_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    def failing() -> Iterator[Row]:
        yield row()
        raise KeyboardInterrupt

    path = tmp_path / "rows.csv"
    with pytest.raises(KeyboardInterrupt):
        write_rows(path, failing())
    assert list(tmp_path.iterdir()) == []
    write_rows(path, [row(y=7.0)])
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_rows(path, failing())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_written_rows_can_be_read_by_whoever_may_read_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_rows(tmp_path / "rows.csv", [row()])
    assert (tmp_path / "rows.csv").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (row(provider="constant", y=1.019), "≤ 1.02"),
        (row(provider="constant", y=1.03), "≤ 1.02 missed"),
        (row(provider="log", y=1.03), "≤ 1.05"),
        (row(provider="log", y=1.06), "≤ 1.05 missed"),
        (row("extra_query_copies", y=1.01), "≤ 1"),
        (row("extra_query_copies", y=1.2), "≤ 1 missed"),
        (row(provider="stats_all_rows", y=2.0), "≤ 2.1"),
        (dataclasses.replace(row(provider="every_1", y=1.26), kernel="monitor"), "≤ 1.25 missed"),
        (dataclasses.replace(row(provider="every_10", y=1.04), kernel="monitor"), "≤ 1.03 missed"),
        (dataclasses.replace(row(provider="every_50", y=1.02), kernel="monitor"), "≤ 1.01 missed"),
        (row(provider="flex_attention", y=20.0), ""),
        (row("times_cheaper", y=9.0), "≥ 10 missed"),
        (row(provider="gap_adaptive", y=3.6), "≤ 3.5 missed"),
        (row("times_slower", "eager_matrix", y=7.0), "≥ 6"),
        (row("times_slower", "eager_matrix", y=5.0), "≥ 6 missed"),
        (row("extra_mb", "stats_all_rows", y=100.0), "≤ 256"),
        (row("added_ms", "attnscale", y=149.0, x=0), "≤ 150"),
        (row("added_ms", "attnscale", y=151.0, x=0), "≤ 150 missed"),
    ],
)
def test_the_summary_says_which_target_is_missed(measured: Row, verdict: str) -> None:
    assert next(iter(summarise([measured])))[-1] == verdict


def test_the_summary_shows_the_quartiles_where_there_are_some() -> None:
    lines = list(summarise([row(y=1.5, spread=0.25), row("extra_query_copies", y=1.0, spread=0.0)]))
    assert lines[0] == ("time_ratio", "512", "forward", "log", "1.500", "1.250 – 1.750", "≤ 1.05 missed")
    assert lines[1] == ("extra_query_copies", "512", "forward", "log", "1.000", "", "≤ 1")


def test_a_plan_is_every_policy_in_both_modes_at_every_length_and_the_import() -> None:
    plan = Plan(lengths=(8, 16), policies=("constant", "log"), rounds=(5, 3), imports=2)
    *attention, last = cases(plan)
    assert last == ImportCost(2)
    assert {
        (case.length, case.rounds, case.policy, case.mode, case.dtype)
        for case in attention
        if isinstance(case, AttentionCost)
    } == {
        (length, rounds, policy, mode, dtype)
        for length, rounds in ((8, 5), (16, 3))
        for policy, dtype in (("constant", "fp32"), ("log", "fp32"), ("log", "bf16"))
        for mode in ("forward", "forward+backward")
    }
    assert sum(isinstance(case, AttentionCost) for case in attention) == 12


def test_a_plan_is_read_from_yaml_and_keeps_the_defaults_it_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("lengths: [64]\nrounds: [4]\n")
    assert Plan.read(path) == Plan(lengths=(64,), rounds=(4,))
    assert Plan.read(None) == Plan()


def test_the_quick_configuration_is_a_plan() -> None:
    path = Path(__file__).resolve().parents[2] / "configs" / "bench" / "quick.yaml"
    assert all(line.startswith("# ") for line in path.read_text().splitlines()[:3])
    assert Plan.read(path).lengths == (512,)


def test_a_plan_with_rounds_for_other_lengths_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"rounds=\(4, 4\) is not accepted.*lengths=\(64,\)"):
        Plan(lengths=(64,), rounds=(4, 4))


def test_a_case_measures_against_torch_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def fake_ratio(candidate: Callable[[], object], baseline: Callable[[], object], rounds: int) -> Quartiles:
        candidate()
        baseline()
        seen["rounds"] = rounds
        return Quartiles(1.5, 1.25, 1.75)

    monkeypatch.setattr("scripts.cost.plan.interleaved_ratio", fake_ratio)
    plan = Plan(lengths=(32,), policies=("log",), heads=2, head_dim=16, rounds=(9,), imports=2)
    time, memory = AttentionCost(plan, "log", 32, "forward+backward", 9).measure()
    sharp = AttentionCost(plan, "log_squared", 32, "forward+backward", 9).measure()
    assert [measured.metric for measured in sharp] == ["time_ratio", "time_ratio_same_logits", "extra_query_copies"]
    assert seen == {"rounds": 9}
    assert (time.metric, time.provider, time.mode, time.x) == ("time_ratio", "log", "forward+backward", 32)
    assert (time.y, time.low, time.high) == (1.5, 1.25, 1.75)
    # One copy of the query; β is cached during the warm-up.
    assert (memory.metric, memory.y) == ("extra_query_copies", 1.0)
    half = AttentionCost(plan, "log", 32, "forward", 9, "bf16").measure()[0]
    assert (half.provider, "bf16" in half.config) == ("log_bf16", True)


@pytest.fixture
def flex_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Uncompiled FlexAttention, as inductor takes half a minute; returns the names of the functions to compile."""
    asked: list[str] = []
    own = torch.compile

    def leave_alone(function: Callable[..., object], **settings: object) -> Callable[..., object]:
        if function.__name__ == "_flex_attention_hop_wrapper":  # torch's warning about uncompiled FlexAttention
            return own(function, **settings)  # type: ignore[call-overload, no-any-return]
        asked.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", leave_alone)
    return asked


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_compiled_and_checked_before_it_is_measured(
    flex_without_a_compiler: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = FlexAttentionCost(heads=2, head_dim=16, length=128, rounds=2)
    (found,) = cost.measure()
    assert (found.kernel, found.provider, found.mode) == ("attention", "flex_attention", "forward")
    assert (found.metric, found.x) == ("time_ratio", 128)
    assert flex_without_a_compiler == ["flex_attention"]
    # With another law the output differs from the reference.
    monkeypatch.setattr("scripts.cost.attention.build_policy", lambda _: attnscale.build_policy("sqrt_log"))
    assert cost.measure() == []
    assert "FlexAttention was not measured at 128 keys: its error is" in caplog.text


def test_flex_attention_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(length: int) -> Callable[..., object]:
        def attend(*qkv: object) -> object:
            raise RuntimeError("inductor has no code for this machine\nand more")

        return attend

    cost = FlexAttentionCost(heads=1, head_dim=8, length=16, rounds=2)
    with monkeypatch.context() as patch:
        patch.setattr("scripts.cost.attention.flex_attention", fail)
        patch.setenv("CXX", "python3")  # an existing program
        assert cost.measure() == []
    assert caplog.messages[-1].endswith("16 keys: RuntimeError: inductor has no code for this machine")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cost.measure() == []
    assert caplog.messages[-1].endswith("no C++ compiler 'no-such-compiler' found")


@pytest.mark.parametrize("name", ["every_1", "every_10", "every_50", "tracked"])
def test_watching_is_measured_against_the_same_training_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []

    def fake_ratio(
        candidate: Callable[[], object],
        baseline: Callable[[], object],
        rounds: int,
        around: Callable[[], AbstractContextManager[object]],
        pairs: int,
    ) -> Quartiles:
        for _ in range(2 * pairs):
            with around():
                candidate()
            baseline()
        return Quartiles(1.5, 1.25, 1.75)

    class Counting(Monitor):
        def step(self, step: int) -> list[Record]:
            reports.append(bool(records := super().step(step)))
            return records

    monkeypatch.setattr("scripts.cost.monitor.interleaved_ratio", fake_ratio)
    monkeypatch.setattr("scripts.cost.monitor.Monitor", Counting)
    monkeypatch.setattr("scripts.cost.monitor.build_gpt", lambda: build_gpt(layers=1, width=16))
    (found,) = MonitorCost(name, 16, rounds=3).measure()
    assert (found.kernel, found.provider, found.metric, found.y) == ("monitor", name, "time_ratio", 1.5)
    # In each pair, the first report belongs to the previous, unmonitored step; the second is measured.
    listened = {"every_1": [True], "every_10": [False] * 9 + [True], "every_50": [False] * 49 + [True]}
    assert reports[::2] == len(reports[::2]) * [False]
    assert reports[1::2] == 2 * listened.get(name, [False])  # and the plain model in between


def test_what_is_around_a_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> None:
        now[0] += seconds

    @contextmanager
    def around() -> Iterator[None]:
        takes(100.0)
        yield
        takes(100.0)

    found = interleaved_ratio(lambda: takes(3.0), lambda: takes(2.0), 4, around)
    assert found == Quartiles(1.5, 1.5, 1.5)


def test_two_models_exchange_roles() -> None:
    found = {("a", "b"): Quartiles(2.0, 1.0, 4.0), ("b", "a"): Quartiles(8.0, 4.0, 9.0)}
    assert in_both_roles(lambda one, other: found[one, other], "a", "b") == Quartiles(4.0, 2.0, 6.0)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_is_measured_with_a_policy_and_without(
    mode: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    heard: list[tuple[str, int, int, bool]] = []

    def fake_ratio(candidate: Callable[[], object], baseline: Callable[[], object], rounds: int) -> Quartiles:
        for function in (candidate, candidate, baseline):
            function()
        return Quartiles(1.5, 1.25, 1.75)

    def heard_as(name: str, attend: Callable[..., object]) -> Callable[..., object]:
        def listen(module: object, query: torch.Tensor, key: torch.Tensor, value: object, mask: object, **more: object):
            heard.append((name, query.shape[2], key.shape[2], mask is not None))
            return attend(module, query, key, value, mask, **more)

        return listen

    monkeypatch.setattr("scripts.cost.models.interleaved_ratio", fake_ratio)
    monkeypatch.setattr("scripts.cost.models.LAYERS", {"prefill": 1, "decode": 1})
    monkeypatch.setitem(SHAPE, "vocab_size", 64)
    assert attnscale.hf  # registers itself
    known = transformers.AttentionInterface._global_mapping
    for name, key in (("ours", "attnscale"), ("stock", "sdpa")):
        monkeypatch.setitem(known, key, heard_as(name, known[key]))
    (found,) = ModelCost(mode, 16, rounds=3, padded=padded).measure()
    assert (found.kernel, found.provider, found.mode) == ("transformers", "log_padded" if padded else "log", mode)
    shape = (16, 16) if mode == "prefill" else (1, 17)
    calls = [call for call in heard if call[1:3] == shape]  # the probe is shorter
    assert [name for name, *_ in calls] == 2 * ["ours", "ours", "stock"]
    assert all(masked is padded for *_, masked in calls)


def test_matrices_and_the_monitor_are_compared_by_what_they_add(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter((3.0, 1.1))

    def fake_ratio(candidate: Callable[[], object], baseline: Callable[[], object], rounds: int) -> Quartiles:
        candidate()
        return Quartiles(*[next(ratios)] * 3)

    monkeypatch.setattr("scripts.cost.monitor.interleaved_ratio", fake_ratio)
    monkeypatch.setattr("scripts.cost.monitor.build_gpt", lambda: build_gpt(layers=1, width=16))
    (found,) = MatrixCost(16, rounds=3).measure()
    assert found.metric == "times_cheaper"
    assert found.y == pytest.approx(20.0)


COLUMNS = ["kernel", "provider", "mode", "metric", "x", "y", "low", "high", "config", "device", "version"]
ROOT = Path(__file__).resolve().parents[2]
TINY = "lengths: [16]\npolicies: [constant, log]\nheads: 2\nhead_dim: 8\nrounds: [2]\nimports: 2\n"
TINY += (
    "rival_lengths: []\n"
    "statistics_lengths: [16]\nstatistics_rounds: [2]\neager_lengths: [16]\nmemory_lengths: [16]\n"
    "monitor_lengths: []\n"
    "model_lengths: []\n"
)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    environment |= {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    roots = (ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(map(str, roots))
    command = [sys.executable, "-m", "scripts.cost", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=cwd, timeout=120)


def cells(table: str) -> list[list[str]]:
    """The rows of a printed table."""
    lines = [line for line in table.splitlines() if line.startswith(("│", "┃"))]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def test_the_command_writes_the_csv_and_prints_the_table(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(TINY)
    finished = run("--config", "plan.yaml", "--output", "results/tiny.csv", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    with (tmp_path / "results" / "tiny.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == COLUMNS == list(Row.__dataclass_fields__)
    assert [row[:5] for row in rows] == [
        *(
            ["attention", policy, mode, metric, "16"]
            for policy in ("constant", "log", "log_bf16")
            for mode in ("forward", "forward+backward")
            for metric in ("time_ratio", "extra_query_copies")
        ),
        *(
            ["statistics", provider, mode, metric, "16"]
            for provider, mode, metric in (
                ("stats_all_rows", "forward", "time_ratio"),
                ("stats_64_rows", "forward", "time_ratio"),
                ("gap_adaptive", "forward", "time_ratio"),
                ("stats_all_rows", "forward+backward", "time_ratio"),
                ("gradient_of_lse", "forward+backward", "time_ratio"),
                ("gradient_of_entropy", "forward+backward", "time_ratio"),
                ("eager_matrix", "forward", "times_slower"),
                ("stats_all_rows", "forward", "extra_mb"),
            )
        ),
        ["import", "attnscale", "fresh process", "added_ms", "0"],
    ]
    assert all(float(low) <= float(y) <= float(high) for y, low, high in (row[5:8] for row in rows))
    assert all(float(row[5]) > 0 for row in rows if not row[3].startswith("extra"))
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["tiny.csv"]
    printed = cells(finished.stdout)
    assert printed[0] == ["metric", "n", "mode", "policy", "ratio", "quartiles", "target"]
    assert [(line[0], line[2], line[3]) for line in printed[1:]] == [(row[3], row[2], row[1]) for row in rows]


BAD_PLANS = {
    "key 'lenghts'": "lenghts: [16]\n",
    "policy='lgo'": TINY.replace("log", "lgo"),
    "policy 'ssmax' needs num_heads": TINY.replace("log", "ssmax"),
    "policies=": TINY.replace("[constant, log]", "log"),
    "lengths=16": TINY.replace("[16]", "16"),
    "lengths=0": TINY.replace("[16]", "[0]"),
    "lengths='long'": TINY.replace("[16]", "[long]"),
    "rounds=": TINY.replace("[2]", "[2, 2]"),
    "rounds=1": TINY.replace("[2]", "[1]"),
    "imports=1": TINY.replace("imports: 2", "imports: 1"),
    "heads=2.5": TINY.replace("heads: 2", "heads: 2.5"),
    "head_dim=0": TINY.replace("head_dim: 8", "head_dim: 0"),
    "well-formed YAML": "lengths: [16\n",
    "a YAML mapping": "- 16\n",
}


@pytest.mark.parametrize(("message", "plan"), BAD_PLANS.items(), ids=list(BAD_PLANS))
def test_a_bad_plan_exits_with_two_says_why_and_leaves_no_csv(
    message: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.cost.plan.interleaved_ratio", lambda *_: pytest.fail("nothing should be measured"))
    (tmp_path / "plan.yaml").write_text(plan)
    assert main(["--config", str(tmp_path / "plan.yaml"), "--output", str(tmp_path / "out.csv")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_bad_plan_exits_with_two_from_a_shell_and_keeps_an_earlier_csv(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(TINY.replace("log", "lgo"))
    (tmp_path / "bench.csv").write_text("earlier\n")
    finished = run("--config", "plan.yaml", cwd=tmp_path)
    assert finished.returncode == 2
    assert "ArgumentError: policy='lgo' is not accepted" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"plan.yaml", "bench.csv"}
    assert (tmp_path / "bench.csv").read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("option", "message"), [("--config", "an existing YAML file"), ("--output", "a CSV file, not a directory")]
)
def test_a_path_that_cannot_serve_exits_with_two_before_measuring(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.cost.plan.interleaved_ratio", lambda *_: pytest.fail("nothing should be measured"))
    assert main([option, str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
