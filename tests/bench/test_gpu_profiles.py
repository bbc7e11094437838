"""Profiles of GPUs: selection, contents and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnscale.bench.gpu import machine
from attnscale.bench.gpu.command import Session
from attnscale.bench.gpu.machine import HostClock, Profile, choose_profile, this_gpu
from attnscale.bench.gpu.problem import Card
from attnscale.bench.gpu.providers import Group, groups
from attnscale.cli import main
from attnscale.errors import BackendError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "bench"
PROFILES = ROOT / "attnscale" / "bench" / "gpu" / "profiles"
CPU = torch.device("cpu")


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


def test_a_plan_for_the_cpu_is_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--dry-run", "--config", str(CONFIGS / "quick.yaml")]) == 2
    assert "key 'policies'" in capsys.readouterr().err


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
