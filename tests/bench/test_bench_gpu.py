"""`attnscale bench gpu`: what it counts, whom it refuses, and what a user sees; on a GPU nothing of it has run."""

from __future__ import annotations

import csv
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import attnscale
import attnscale_kernels
from attnscale.bench.gpu import machine, rivals, suites
from attnscale.bench.gpu.adaptive import ADAPTIVE, BRACKET, POLICY
from attnscale.bench.gpu.clock import HostClock, interleaved
from attnscale.bench.gpu.correctness import check_a_few_rows, verify
from attnscale.bench.gpu.figures import Card, work_of
from attnscale.bench.gpu.machine import Machine, this_gpu
from attnscale.bench.gpu.plots import ROOFLINE, curves_of, draw
from attnscale.bench.gpu.problem import Problem
from attnscale.bench.gpu.profile import Profile, choose_profile
from attnscale.bench.gpu.provider import Answer, Attention, Provider, by_law
from attnscale.bench.gpu.report import header, lines
from attnscale.bench.gpu.results import Result, rows_of
from attnscale.bench.gpu.runner import Session
from attnscale.bench.gpu.suites import SUITES, Group, Suite, groups
from attnscale.bench.gpu.telemetry import Telemetry
from attnscale.bench.rows import Row
from attnscale.cli import main
from attnscale.errors import BackendError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "bench"
PROFILES = ROOT / "attnscale" / "bench" / "gpu" / "profiles"
CPU = torch.device("cpu")
SELF = Problem(2, 4, 2, 128, 128, 64, torch.bfloat16, CPU, "log")
DECODE = Problem(3, 8, 2, 1, 1000, 128, torch.float16, CPU, "log")
SMALL = Problem(2, 2, 1, 17, 17, 8, torch.float32, CPU, "log")
TINY = replace(Profile().tiny(), suites=("attention",), lengths=(8, 16), head_dims=(8,), check_length=9)
HERE = Machine(CPU, "interpreter", HostClock(), None, "torch")


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


PEAKS = {
    "a100_pcie_40gb": (312, 1555),
    "a100_pcie_80gb": (312, 1935),
    "a100_sxm_40gb": (312, 1555),
    "a100_sxm_80gb": (312, 2039),
    "h100_pcie": (756, 2000),
    "h100_sxm": (989, 3350),
    "h200": (989, 4800),
    "b200": (2250, 8000),
    "l40s": (362, 864),
    "rtx_4090": (165.2, 1008),
    "rtx_5090": (209.5, 1792),
    "mi300x": (1307, 5300),
}
CARDS = {
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb",
    "NVIDIA A100 80GB PCIe": "a100_pcie_80gb",
    "NVIDIA A100-SXM4-40GB": "a100_sxm_40gb",
    "NVIDIA A100-SXM4-80GB": "a100_sxm_80gb",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H100 80GB HBM3": "h100_sxm",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "NVIDIA GeForce RTX 5090": "rtx_5090",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_profile_says_what_it_is_how_to_run_it_and_what_its_card_can_do(name: str) -> None:
    path = PROFILES / f"{name}.yaml"
    what, command, override = path.read_text().splitlines()[:3]
    assert what.startswith("# ")
    assert f"bench gpu --config attnscale/bench/gpu/profiles/{name}.yaml" in command
    profile = Profile.read(path)
    assert (profile.peak_tflops, profile.bandwidth_gbs) == PEAKS[name]
    key = override.removeprefix("# ").partition(":")[0]
    assert key in Profile.__dataclass_fields__


@pytest.mark.parametrize("found", CARDS)
def test_the_card_found_chooses_its_profile_wherever_one_is(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = choose_profile(None, found)
    assert chosen == Profile.read(PROFILES / f"{CARDS[found]}.yaml") == choose_profile(PROFILES, found)
    assert chosen.card(found) == Card(*PEAKS[CARDS[found]])


def test_there_is_a_test_of_every_profile() -> None:
    assert {path.stem for path in PROFILES.iterdir()} == set(PEAKS) == set(CARDS.values())


@pytest.mark.parametrize(
    "found", ["NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_another_card_has_sizes_but_no_roofline(found: str) -> None:
    assert choose_profile(None, found) == Profile()
    assert Profile.read(PROFILES / "h200.yaml").card(found) is None


def test_a_folder_without_the_card_leaves_the_built_in_sizes(tmp_path: Path) -> None:
    assert choose_profile(tmp_path, "NVIDIA B200") == Profile()


def test_tokens_of_a_batch_are_the_same_at_every_length() -> None:
    sizes = {"lengths": (1024, 256), "tokens": 4096, "decode_lengths": (512,), "decode_tokens": 2048}
    profile = replace(Profile(), **sizes, heads=8, kv_heads=4, decode_kv_heads=2)
    attention = Group("attention", "forward", torch.bfloat16, 64).problems(profile, CPU)
    assert [(p.batch, p.queries, p.keys, p.heads, p.kv_heads) for p in attention] == [
        (16, 256, 256, 8, 4),
        (4, 1024, 1024, 8, 4),
    ]
    (decode,) = Group("decode", "forward", torch.bfloat16, 64).problems(profile, CPU)
    assert (decode.batch, decode.queries, decode.keys, decode.kv_heads) == (4, 1, 512, 2)


def test_a_profile_measures_every_suite_in_every_mode() -> None:
    found = [(group.suite, group.mode, group.dim) for group in groups(Profile(head_dims=(64,)))]
    assert found == [
        ("attention", "forward", 64),
        ("attention", "forward+backward", 64),
        ("statistics", "forward", 64),
        ("adaptive", "forward", 64),
        ("decode", "forward", 64),
    ]


BAD = {
    "key 'lenghts'": "lenghts: [16]",
    "key 'policies'": "policies: [log]",
    "device=''": "peak_tflops: 100",
    "device='X100'": "device: X100",
    "device=100": "device: 100",
    "peak_tflops=0": "{device: X100, peak_tflops: 0, bandwidth_gbs: 1}",
    "bandwidth_gbs='fast'": "{device: X100, peak_tflops: 1, bandwidth_gbs: fast}",
    "suites='decoding'": "suites: [decoding]",
    "dtypes='fp8'": "dtypes: [fp8]",
    "lengths=16": "lengths: 16",
    "lengths=()": "lengths: []",
    "lengths=0": "lengths: [0]",
    "kv_heads=3": "kv_heads: 3",
    "rounds=1": "rounds: 1",
    "law='lgo'": "law: lgo",
    "law='gap_adaptive'": "law: gap_adaptive",
    "well-formed YAML": "lengths: [16",
}


@pytest.mark.parametrize(("message", "text"), BAD.items(), ids=list(BAD))
def test_a_bad_profile_exits_with_two_quotes_the_key_and_leaves_nothing(
    message: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "measure", lambda *_: pytest.fail("nothing should be measured"))
    config = tmp_path / "profile.yaml"
    config.write_text(text + "\n")
    outputs = ["--output", str(tmp_path / "gpu.csv"), "--plots", str(tmp_path / "plots")]
    assert main(["bench", "gpu", "--dry-run", "--config", str(config), *outputs]) == 2
    captured = capsys.readouterr()
    assert message.replace("law=", "policy=") in captured.err or message in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["profile.yaml"]


def test_a_plan_for_the_cpu_is_no_profile_and_a_profile_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--dry-run", "--config", str(CONFIGS / "quick.yaml")]) == 2
    assert "key 'policies'" in capsys.readouterr().err
    assert main(["bench", "--config", str(PROFILES / "h100_sxm.yaml")]) == 2
    assert "key 'device'" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_to_do_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("BackendError: ")
    assert "--dry-run" in message
    assert "--static" in message
    assert list(tmp_path.iterdir()) == []


def test_the_script_is_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "bench_gpu.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert "a CSV file, not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--dry-run"], ["--static"], ["--plots", "there"], ["--bundle", "there.zip"]])
def test_options_of_the_gpu_are_refused_on_the_cpu(
    option: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscale.bench.cost.cases", lambda plan: pytest.fail("nothing should be measured"))
    assert main(["bench", *option]) == 2
    assert f"{option[0].strip('-').replace('-', '_')}=" in capsys.readouterr().err


def test_plots_into_a_file_are_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "gpu", "--dry-run", "--plots", str(tmp_path / "file")]) == 2
    assert "plots=" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes torch believe in a card of some name."""

    def pretend(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(machine, "DeviceClock", lambda device: HostClock())
        monkeypatch.setattr(machine, "interpreting", lambda: False)

    return pretend


def test_a_known_card_gets_its_roofline_and_another_a_note(gpu: Callable[[str], None]) -> None:
    gpu("NVIDIA H100 80GB HBM3")
    profile, known = this_gpu(None)
    assert (profile.device, known.card, known.name) == ("H100 80GB HBM3", Card(989, 3350), "NVIDIA H100 80GB HBM3")
    assert this_gpu(PROFILES / "a100_sxm_80gb.yaml")[1].card is None
    assert "'A100-SXM4-80GB'" in this_gpu(PROFILES / "a100_sxm_80gb.yaml")[1].notes[0]
    gpu("Some Card")
    assert this_gpu(None)[1].card is None
    assert "no profile" in this_gpu(None)[1].notes[0]


def test_a_gpu_is_not_measured_in_the_interpreter(gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("NVIDIA B200")
    monkeypatch.setattr(machine, "interpreting", lambda: True)
    with pytest.raises(BackendError, match="TRITON_INTERPRET"):
        this_gpu(None)


def changed(change: Callable[[Answer, Problem], Answer], **options: object) -> Provider:
    """The eager provider with statistics, its scores not rounded, and something done to its answer."""

    def prepare(problem: Problem) -> Attention:
        attend = rivals.eager(True, problem)

        def unrounded(*inputs: Tensor) -> Answer:
            answer = attend(*(x.float() for x in inputs))
            return change(answer._replace(output=answer.output.to(problem.dtype)), problem)

        return unrounded

    return Provider("changed", prepare, by_law, **options)  # type: ignore[arg-type]


def off_by(amount: float) -> Callable[[Answer, Problem], Answer]:
    return lambda answer, problem: answer._replace(output=answer.output + amount)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 1.001 * gradient


def wrong_gradient(answer: Answer, problem: Problem) -> Answer:
    return answer._replace(output=_WrongGradient.apply(answer.output))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_who_computes_attention_is_right(dtype: torch.dtype, backward: bool) -> None:
    verdict = verify(rivals.EAGER_STATISTICS, replace(SMALL, dtype=dtype), backward=backward)
    assert verdict.right
    assert 0 < verdict.share <= 1


@pytest.mark.parametrize(
    ("amount", "dtype", "right"),
    [
        (0.0, torch.float32, True),
        (1e-5, torch.float32, False),
        (1e-5, torch.float16, True),
        (0.1, torch.float16, False),
    ],
)
def test_what_may_be_wrong_is_measured_by_torchs_own_error_in_the_dtype(
    amount: float, dtype: torch.dtype, right: bool
) -> None:
    assert verify(changed(off_by(amount)), replace(SMALL, dtype=dtype), backward=False).right == right


def test_a_law_is_checked_as_such() -> None:
    # Standard attention is no attention under a law, nor the reverse.
    standard = rivals.sdpa(torch.nn.attention.SDPBackend.MATH, SMALL)
    assert verify(Provider("sdpa", lambda _: standard), SMALL, backward=False).right
    assert not verify(Provider("sdpa", lambda _: standard, by_law), SMALL, backward=False).right
    assert not verify(replace(rivals.EAGER, temperature=rivals.SDPA[0].temperature), SMALL, backward=False).right


def test_a_wrong_gradient_shows_in_backward_only() -> None:
    assert verify(changed(wrong_gradient), SMALL, backward=False).right
    verdict = verify(changed(wrong_gradient), SMALL, backward=True)
    assert not verdict.right
    assert verdict.quantity in ("dq", "dk", "dv")


@pytest.mark.parametrize("name", ["lse", "max_logit", "entropy"])
def test_a_wrong_statistic_is_named(name: str) -> None:
    def spoil(answer: Answer, problem: Problem) -> Answer:
        return answer._replace(statistics={**answer.statistics, name: answer.statistics[name] + 0.01})

    verdict = verify(changed(spoil), SMALL, backward=False)
    assert (verdict.right, verdict.quantity) == (False, name)
    assert verdict.error == pytest.approx(0.01, rel=1e-2)


def test_what_is_no_number_is_not_right() -> None:
    verdict = verify(changed(off_by(float("nan"))), SMALL, backward=False)
    assert not verdict.right
    assert verdict.quantity == "output"


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.05, True), (0.98, False), (1.1 * BRACKET, False)])
def test_an_adaptive_temperature_must_lie_where_exact_gaps_put_it(factor: float, right: bool) -> None:
    low, _ = ADAPTIVE[1].bounds(SMALL, SMALL.inputs(backward=False))  # type: ignore[misc]
    beta = torch.where(low <= POLICY.floor, low, (factor * low).clamp(max=POLICY.ceiling)).float()

    def prepare(problem: Problem) -> Attention:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
            sharp = query * beta[..., None]
            return Answer(F.scaled_dot_product_attention(sharp, key, value, is_causal=True, enable_gqa=True))

        return attend

    provider = Provider("guess", prepare, lambda *_: beta, ADAPTIVE[1].bounds)
    verdict = verify(provider, SMALL, backward=False)
    assert verdict.right == right
    assert right or verdict.quantity == "β"


def test_a_gross_mistake_at_full_size_is_seen_in_the_last_rows() -> None:
    problem = replace(SMALL, queries=300, keys=300)
    inputs = problem.inputs(backward=False)
    output = rivals.EAGER.prepare(problem)(*inputs.leaves).output
    assert check_a_few_rows(rivals.EAGER, problem, inputs, output).right
    for broken in (0.0, float("nan")):
        spoiled = output.clone()
        spoiled[-1, -1, -1] = broken
        assert not check_a_few_rows(rivals.EAGER, problem, inputs, spoiled).right
    adaptive = replace(rivals.EAGER, bounds=ADAPTIVE[0].bounds)
    assert check_a_few_rows(adaptive, problem, inputs, output).right
    assert not check_a_few_rows(adaptive, problem, inputs, spoiled).right


def failing(error: Exception, *, at: int = 0) -> Callable[[Problem], Attention]:
    def prepare(problem: Problem) -> Attention:
        if problem.keys >= at:
            raise error
        return rivals.eager(False, problem)

    return prepare


def provider(name: str, prepare: Callable[[Problem], Attention] | None = None, *, ours: bool = False) -> Provider:
    return Provider(name, prepare or (lambda problem: rivals.eager(False, problem)), by_law, ours=ours)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts other providers into the suite of attention."""

    def put(*providers: Provider) -> None:
        names = tuple(provider.name for provider in providers)
        monkeypatch.setitem(suites.SUITES, "attention", Suite(providers, ("forward",), names))

    return put


GROUP = Group("attention", "forward", torch.float32, 8)


def test_a_provider_that_is_wrong_gets_no_speed(suite: Callable[..., None]) -> None:
    suite(provider("good"), replace(changed(off_by(0.01)), name="bad"), provider("also good"))
    rows, notes = Session(GROUP, TINY, HERE).measure()
    assert {row.provider for row in rows} == {"good", "also good"}
    assert {row.x for row in rows} == {8, 16}
    (note,) = notes
    assert (note.refused, note.provider) == (True, "bad")
    assert re.search(r"error 1\.0\de-02 of output where \d\.\d\de-0\d is allowed \(9 keys", note.reason)


def test_a_provider_that_is_wrong_only_at_length_gets_no_speed_there(suite: Callable[..., None]) -> None:
    def cut(answer: Answer, problem: Problem) -> Answer:
        return answer if problem.keys < 16 else answer._replace(output=torch.zeros_like(answer.output))

    suite(provider("good"), replace(changed(cut), name="cut"))
    rows, notes = Session(GROUP, TINY, HERE).measure()
    assert {(row.provider, row.x) for row in rows} == {("good", 8), ("good", 16), ("cut", 8)}
    assert [(note.refused, note.provider) for note in notes] == [(True, "cut")]


@pytest.mark.parametrize("at", [0, 16])
def test_what_fails_is_left_out_but_ours_is_refused(at: int, suite: Callable[..., None]) -> None:
    broken = failing(RuntimeError("no such kernel\nat length"), at=at)
    suite(provider("good"), provider("theirs", broken), provider("ours", broken, ours=True))
    rows, notes = Session(GROUP, TINY, HERE).measure()
    assert [(note.refused, note.provider) for note in notes] == [(False, "theirs"), (True, "ours")]
    assert {note.reason for note in notes} == {"RuntimeError: no such kernel"}
    assert {row.x for row in rows if row.provider == "ours"} == ({8} if at else set())


def test_out_of_memory_is_left_out_whoever_it_is(suite: Callable[..., None]) -> None:
    suite(provider("good"), provider("large", failing(torch.OutOfMemoryError("much"), at=16), ours=True))
    _, notes = Session(GROUP, TINY, HERE).measure()
    assert [(note.refused, note.reason) for note in notes] == [(False, "out of memory at 16 keys")]


def test_gradients_are_checked_where_backward_is_measured(suite: Callable[..., None]) -> None:
    suite(provider("good"), replace(changed(wrong_gradient), name="bad"))
    for mode, right in (("forward", {"good", "bad"}), ("forward+backward", {"good"})):
        rows, _ = Session(GROUP._replace(mode=mode), TINY, HERE).measure()
        assert {row.provider for row in rows} == right


def test_the_command_refuses_loudly_and_exits_with_one(
    suite: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profile, "tiny", lambda self: TINY)
    arguments = ["bench", "gpu", "--dry-run", "--output", str(tmp_path / "gpu.csv")]
    suite(provider("good"))
    assert main(arguments) == 0
    suite(provider("good"), replace(changed(off_by(0.01)), name="bad"))
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "refused  bad (attention forward): error 1.0" in printed
    assert {row["provider"] for row in read(tmp_path / "gpu.csv")} == {"good"}


class FakeClock:
    """Seconds as told, and a record of who ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def seconds(self, function: Callable[[], object]) -> float:
        name, seconds = function()  # type: ignore[misc]
        self.calls.append(name)
        return float(seconds)

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
        return function(), 2**20

    def telemetry(self) -> Telemetry:
        return Telemetry(mhz=1980.0, watts=650.5)

    def refuse(self, function: Callable[[], object]) -> float:
        raise BackendError("the host waits")


def lasting(name: str, *seconds: float) -> Callable[[], tuple[str, float]]:
    durations = iter(seconds)
    return lambda: (name, next(durations))


def test_every_round_runs_all_in_changing_order_after_a_warm_up() -> None:
    fake = FakeClock()
    rounds = 12
    functions = {name: lasting(name, 100.0, *map(float, range(rounds))) for name in "abc"}
    samples = interleaved(functions, fake, warm_up=1, rounds=rounds)
    assert samples == {name: list(map(float, range(rounds))) for name in "abc"}
    warm_up, measured = fake.calls[:3], fake.calls[3:]
    assert warm_up == ["a", "b", "c"]
    in_rounds = [tuple(measured[start : start + 3]) for start in range(0, 3 * rounds, 3)]
    assert {tuple(sorted(names)) for names in in_rounds} == {("a", "b", "c")}
    assert len(set(in_rounds)) > 2


def test_the_state_of_the_card_stands_beside_every_length(
    suite: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite(provider("good"))
    monkeypatch.setattr(HostClock, "telemetry", FakeClock.telemetry)
    rows, _ = Session(GROUP, TINY, HERE).measure()
    assert [(row.x, row.metric, row.y) for row in rows if row.provider == "card"] == [
        (length, metric, value) for length in TINY.lengths for metric, value in (("mhz", 1980.0), ("watts", 650.5))
    ]
    assert {line[4] for line in lines(rows, dry_run=True)} == {"good"}


def test_what_cannot_be_timed_is_left_out(suite: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    suite(provider("good"))
    monkeypatch.setattr(HostClock, "seconds", FakeClock.refuse)
    rows, notes = Session(GROUP, replace(TINY, warm_up=1), HERE).measure()
    assert [row for row in rows if row.provider == "good"] == []
    assert [note.reason for note in notes] == ["BackendError: the host waits"]


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
        rivals.FLASH_ATTN, ("flash_attn", "flash_attn_interface"), (function, with_lse), strict=True
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
    output = rivals.EAGER.prepare(problem)(*problem.inputs(backward=False).leaves).output
    assert set(seen) == {dtype} == {output.dtype}
    assert verify(rivals.EAGER, problem, backward=True).right
    assert verify(rivals.EAGER_STATISTICS, problem, backward=False).right


def test_the_matrix_of_scores_is_not_tried_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    fits = Problem(16, 16, 16, 1024, 1024, 64, torch.bfloat16, torch.device("cuda"), "log")
    assert rivals.EAGER.why_not(fits, True) is None
    large = replace(fits, batch=1, queries=16384, keys=16384)
    assert rivals.EAGER.why_not(large, True) == "a matrix of scores takes 16 GiB"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m attnscale` in a shell that knows nothing of triton's interpreter."""
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TRITON_INTERPRET")}
    roots = [str(Path(package.__file__).parents[1]) for package in (attnscale, attnscale_kernels)]
    environment |= {"NO_COLOR": "1", "COLUMNS": "150", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONPATH"] = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "attnscale", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=cwd, timeout=600)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("dry")
    return run("bench", "gpu", "--dry-run", "--output", "new/gpu.csv", "--plots", "plots", cwd=folder), folder


ON_CPU = {
    "attention forward": ["attnscale", "sdpa_flash", "sdpa_math", "flex", "eager"],
    "attention forward+backward": ["attnscale", "sdpa_flash", "sdpa_math", "eager"],
    "statistics forward": ["none", "lse+max", "entropy", "eager"],
    "adaptive forward": ["attnscale", "gap_adaptive", "gap_adaptive_blockwise"],
    "decode forward": ["attnscale", "attnscale_split", "sdpa_flash", "sdpa_math", "flex", "eager"],
}


def test_a_dry_run_checks_every_provider_that_runs_here(
    dry_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    finished, folder = dry_run
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    rows = read(folder / "new" / "gpu.csv")
    assert list(rows[0]) == list(Row.__dataclass_fields__)
    found: dict[str, list[str]] = {}
    for row in rows:
        names = found.setdefault(f"{row['kernel']} {row['mode']}", [])
        names += [row["provider"]] * (row["provider"] not in names)
    assert found == ON_CPU
    shares = [float(row["y"]) for row in rows if row["metric"] == "error_share"]
    assert len(shares) == 2 * sum(map(len, ON_CPU.values()))  # two lengths
    assert 0 < max(shares) <= 1
    assert all(float(row["low"]) <= float(row["y"]) <= float(row["high"]) for row in rows)


def test_a_dry_run_never_speaks_of_a_gpus_speed(dry_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    finished, folder = dry_run
    assert {row["device"] for row in read(folder / "new" / "gpu.csv")} == {"interpreter"}
    assert "dry run in triton's interpreter: numbers are checked, times mean nothing" in finished.stdout
    assert "meaningless" in finished.stdout
    for speed in ("TFLOP", "GB/s", "roofline"):
        assert speed not in finished.stdout
    for version in (2, 3):
        where = "(attention forward, attention forward+backward, decode forward)"
        assert f"left out  flash_attn_{version} {where}: " in finished.stdout


def test_a_dry_run_draws_a_picture_for_every_suite(dry_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    folder = dry_run[1]
    assert {path.name for path in folder.iterdir()} == {"new", "plots"}
    pictures = sorted((folder / "plots").iterdir())
    assert [path.name for path in pictures] == ["adaptive.png", "attention.png", "decode.png", "statistics.png"]
    for path in pictures:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 10_000


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
    from attnscale.bench.gpu.plots import COLOURS

    for suite in SUITES.values():
        names = [provider.name for provider in suite.providers]
        assert len(set(names)) == len(names)
        assert set(names) <= set(COLOURS)
        assert len({COLOURS[name] for name in names}) == len(names)


def test_nothing_is_drawn_of_what_was_not_measured(tmp_path: Path) -> None:
    assert draw([], tmp_path / "plots") == []


@pytest.mark.parametrize("option", ["config", "output", "plots", "bundle"])
def test_what_is_printed_only_takes_no_paths(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--static", f"--{option}", "there"]) == 2
    assert f"{option}='there'" in capsys.readouterr().err


def test_a_dry_run_is_not_static() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "gpu", "--static", "--dry-run"])
    assert stopped.value.code == 2
