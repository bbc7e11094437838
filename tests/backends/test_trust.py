"""Trust at first use: "auto" takes the kernels on a device only where they have passed a check there.

There is no such device here. The interpreter stands for one, with a stub in place of the check where that is not itself
what is tested.
"""

from __future__ import annotations

import importlib
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from corrected_interpreter import corrected
from torch import Tensor

import attnscale
from attnscale import AttnScaleWarning, StatsRequest, attention_with_stats, explain_dispatch
from attnscale._util import state
from attnscale._util.files import cache_folder
from attnscale.backends import dispatch, trust
from attnscale.backends.self_check import find_fault
from attnscale.backends.triton import TritonBackend
from attnscale.errors import ArgumentError
from attnscale.statistics import AttentionOutput

CPU = torch.device("cpu")
FAULT = "the output has an error of 3.0e+00"


class Card:
    """A stub of the check on a device, which counts how often it runs."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.checks: list[torch.dtype] = []
        self.modes: list[tuple[bool, bool, bool]] = []

    def check(self, device: torch.device, dtype: torch.dtype) -> str | None:
        self.checks.append(dtype)
        self.modes.append(
            (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        )
        if self.fault == "raise":
            raise RuntimeError("an illegal memory access was encountered\nmore")
        if self.fault == "memory":
            raise torch.OutOfMemoryError("out of memory")
        return self.fault

    def restart(self) -> None:
        """Forget what a process remembers."""
        state.TRITON_OUTCOMES.clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Card]:
    card = Card()
    monkeypatch.delenv(trust.BY_HAND, raising=False)
    monkeypatch.setenv("ATTNSCALE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(TritonBackend, "automatic", True)
    monkeypatch.setattr(dispatch, "check_kernels", card.check)
    card.restart()
    yield card
    card.restart()


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 4, 16, generator=generator).to(dtype) for _ in range(3))


def chosen(dtype: torch.dtype = torch.float32) -> str:
    """Who would compute a call with statistics."""
    return explain_dispatch(*qkv(dtype), policy="log", request=StatsRequest()).chosen


def test_kernels_that_pass_are_used_and_checked_once(card: Card) -> None:
    assert chosen() == "triton"
    assert chosen() == "triton"
    assert card.checks == [torch.float32]


def test_what_passed_is_remembered_by_the_next_process(card: Card) -> None:
    assert chosen() == "triton"
    card.restart()
    assert chosen() == "triton"
    assert card.checks == [torch.float32]


def test_every_dtype_has_a_check_of_its_own(card: Card) -> None:
    assert chosen(torch.float16) == chosen() == "triton"
    assert card.checks == [torch.float16, torch.float32]


def test_kernels_that_fail_give_one_warning_and_the_blockwise_backend(card: Card) -> None:
    card.fault = FAULT
    with pytest.warns(
        AttnScaleWarning, match=r"not used on cpu.*error of 3.0e\+00.*doctor.*ATTNSCALE_TRITON=1"
    ) as seen:
        output = attention_with_stats(*qkv(), policy="log").output
    assert len(seen) == 1
    expected = attention_with_stats(*qkv(), policy="log", backend="blockwise").output
    assert torch.equal(output, expected)
    found = explain_dispatch(*qkv(), policy="log", request=StatsRequest())
    assert found.chosen == "blockwise"
    reason = next(verdict.reason for verdict in found.verdicts if verdict.backend == "triton")
    assert reason.startswith("usable, only on explicit request: their check on this device failed (the output has")
    assert card.checks == [torch.float32]


def test_a_failure_is_remembered_and_warned_of_in_each_process(card: Card) -> None:
    card.fault = FAULT
    for _ in range(2):
        with pytest.warns(AttnScaleWarning, match="not used"):
            assert chosen() == "blockwise"
        card.restart()
    assert card.checks == [torch.float32]


def test_kernels_that_raise_have_failed(card: Card) -> None:
    card.fault = "raise"
    with pytest.warns(AttnScaleWarning, match="RuntimeError: an illegal memory access was encountered"):
        assert chosen() == "blockwise"


def test_a_device_without_memory_for_the_check_is_asked_again(card: Card) -> None:
    card.fault = "memory"
    assert chosen() == "blockwise"
    card.fault = None
    assert chosen() == "triton"


def test_an_explicit_request_needs_no_trust(card: Card) -> None:
    card.fault = FAULT
    found = explain_dispatch(*qkv(), policy="log", backend="triton", request=StatsRequest())
    assert found.chosen == "triton"
    attention_with_stats(*qkv(), policy="log", backend="triton")
    assert card.checks == []


@pytest.mark.parametrize(("value", "expected"), [("0", "blockwise"), ("1", "triton")])
def test_the_environment_decides_by_hand(
    card: Card, monkeypatch: pytest.MonkeyPatch, value: str, expected: str
) -> None:
    card.fault = FAULT if value == "1" else None
    monkeypatch.setenv("ATTNSCALE_TRITON", value)
    assert chosen() == expected
    assert card.checks == []


def test_any_other_value_of_the_variable_is_refused(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSCALE_TRITON", "yes")
    with pytest.raises(ArgumentError, match="ATTNSCALE_TRITON='yes' is not accepted: expected '0' or '1'"):
        chosen()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"fault": 3}', '{"identity": {}, "fault": null, "day": "2026-01-01"}'],
)
def test_a_file_that_is_not_ours_is_written_anew(card: Card, content: str) -> None:
    assert chosen() == "triton"
    (file,) = cache_folder().iterdir()
    whole = file.read_text(encoding="utf-8")
    file.write_text(content, encoding="utf-8")
    card.restart()
    assert chosen() == "triton"
    assert card.checks == [torch.float32] * 2
    assert file.read_text(encoding="utf-8") == whole


def test_a_damaged_outcome_counts_for_nothing(card: Card) -> None:
    assert chosen() == "triton"
    (file,) = cache_folder().iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "fault": 3}), encoding="utf-8")
    card.restart()
    assert chosen() == "triton"
    assert len(card.checks) == 2


def test_a_cache_that_cannot_be_written_means_a_check_in_each_process(
    card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("", encoding="utf-8")
    monkeypatch.setenv("ATTNSCALE_CACHE_DIR", str(in_the_way / "cache"))
    assert chosen() == chosen() == "triton"
    card.restart()
    assert chosen() == "triton"
    assert len(card.checks) == 2


@pytest.mark.parametrize("part", ["device", "capability", "driver", "torch", "triton", "attnscale", "kernels", "dtype"])
def test_another_card_or_version_is_checked_by_itself(card: Card, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    assert chosen() == "triton"
    card.restart()
    identity = {**trust.identity(CPU, torch.float32), part: "another"}
    monkeypatch.setattr(trust, "identity", lambda device, dtype: identity)
    assert chosen() == "triton"
    assert len(card.checks) == 2


def test_the_identity_of_a_card_is_its_name_capability_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: nvidia)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    found = trust.identity(torch.device("cuda", 1), torch.bfloat16)
    assert (found["device"], found["capability"], found["dtype"]) == ("NVIDIA H100", "9.0", "bfloat16")
    assert found["driver"].startswith("12080")
    assert found["torch"] == torch.__version__
    amd = SimpleNamespace(name="MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: amd)
    assert trust.identity(torch.device("cuda", 0), torch.bfloat16)["capability"] == "gfx942:sramecc+:xnack-"


def test_while_a_cuda_graph_is_captured_nothing_is_checked(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    device, properties = torch.device("cuda", 0), SimpleNamespace(name="card", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "while a CUDA graph is captured" in str(trust.why_distrusted(device, torch.float16, card.check))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert trust.why_distrusted(device, torch.float16, card.check) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert trust.why_distrusted(device, torch.float16, card.check) is None


def test_no_mode_of_the_caller_reaches_the_check(card: Card) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        chosen()
    assert card.modes == [(False, True, False)]


def test_threads_that_meet_at_the_first_use_check_once(card: Card) -> None:
    threads = [threading.Thread(target=chosen) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(card.checks) == 1


def test_a_compiled_call_is_checked_while_it_is_traced(card: Card) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnscale.scaled_dot_product_attention(q, k, v, policy="log", softcap=2.0)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*qkv()), attend(*qkv()))
    assert card.checks == [torch.float32]


def test_softmax_asks_for_the_same_trust(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = importlib.import_module("attnscale.softmax")
    monkeypatch.setattr(softmax, "interpreting", lambda: False)
    ran = []
    monkeypatch.setattr(softmax, "_by_kernel", lambda *arguments: ran.append(arguments))
    card.fault = FAULT
    with pytest.warns(AttnScaleWarning, match="not used"):
        attnscale.softmax(torch.randn(3, 4))
    assert not ran
    card.fault = None
    (file,) = cache_folder().iterdir()
    file.unlink()
    card.restart()
    attnscale.softmax(torch.randn(3, 4))
    assert len(ran) == 1


def test_the_outcome_is_a_small_file_that_says_what_it_is_about(card: Card) -> None:
    chosen()
    (file,) = cache_folder().iterdir()
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["fault"] is None
    assert content["identity"]["torch"] == torch.__version__


@pytest.mark.parametrize("remembered", [None, FAULT])
def test_doctor_shows_what_is_remembered_and_repeats_the_check(
    card: Card, monkeypatch: pytest.MonkeyPatch, remembered: str | None
) -> None:
    doctor = importlib.import_module("attnscale.doctor")
    properties = SimpleNamespace(name="card", major=9, minor=0)
    for name, value in {"device_count": lambda: 1, "get_device_name": lambda index: "card"}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(doctor, "interpreting", lambda: False)
    monkeypatch.setattr(doctor, "why_unavailable", lambda: None)
    monkeypatch.setattr(doctor, "_self_check", lambda name: "works")
    monkeypatch.setattr(doctor, "check_kernels", card.check)
    card.fault = remembered
    trust.repeat(torch.device("cuda", 0), torch.float16, card.check)
    card.fault = None
    lines = {subject: value for topic, subject, value in doctor.doctor().findings if topic == "triton"}
    before = "passed" if remembered is None else rf"failed ({FAULT})"
    assert lines["cuda:0 float16"].startswith("check passed on 2")
    assert f"previous result: {before} on 2" in lines["cuda:0 float16"]
    assert lines["cuda:0 bfloat16"].endswith("no previous result")
    assert lines["cache folder"] == str(cache_folder())
    assert card.checks == [torch.float16, torch.bfloat16, torch.float16, torch.float32]


def test_the_folder_is_where_each_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTNSCALE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    found = {}
    for system in ("linux", "darwin", "win32"):
        monkeypatch.setattr("sys.platform", system)
        found[system] = cache_folder().relative_to(tmp_path).as_posix()
    assert found == {"linux": "xdg/attnscale", "darwin": "Library/Caches/attnscale", "win32": "local/attnscale"}
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "attnscale"


@pytest.fixture(scope="module")
def _corrected() -> Iterator[None]:
    with corrected():
        yield


@pytest.mark.usefixtures("_corrected")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernels_pass_their_check_in_the_interpreter(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    assert dispatch.check_kernels(CPU, dtype) is None
    assert torch.equal(torch.get_rng_state(), before)


class Broken:
    """The reference with one thing wrong."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._own = dispatch.MEASURING["reference"]

    def run(self, call):
        out = self._own.run(call)
        rows = call.query.shape[2]
        if self._what == "output" and rows > 1:
            out = torch.cat([out[:, :, :-1], out[:, :, -1:] * 1.5], 2)
        if self._what == "decoded output" and rows == 1:
            out = out + 0.01
        if self._what == "nan":
            out = out.masked_fill(torch.arange(rows)[:, None] == 3, torch.nan)
        if self._what == "gradient" and out.requires_grad:
            out.register_hook(lambda gradient: gradient * 1.01)
        return out

    def measure(self, call, request):
        output, stats = self._own.measure(call, request)
        if self._what == "entropy":
            stats = stats._replace(entropy=stats.entropy + 0.01)
        if self._what == "gap counts":
            stats = stats._replace(gap_counts=stats.gap_counts + 1)
        if self._what == "bracket":
            stats = stats._replace(accumulation=stats.accumulation._replace(lower=2 * stats.accumulation.upper))
        return AttentionOutput(output, stats)


@pytest.mark.parametrize("what", ["output", "decoded output", "nan", "gradient", "entropy", "gap counts", "bracket"])
def test_the_check_finds_what_is_wrong(what: str) -> None:
    fault = find_fault(Broken(what), dispatch.MEASURING["reference"], CPU, torch.float32)
    assert {"nan": "output"}.get(what, what) in str(fault)


def test_the_check_finds_a_wrong_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    op = importlib.import_module("attnscale_kernels.softmax.op")
    monkeypatch.setattr(op, "row_softmax", lambda scores: SimpleNamespace(weights=scores.softmax(0)))
    fault = find_fault(Broken("nothing"), dispatch.MEASURING["reference"], CPU, torch.float32)
    assert "softmax" in str(fault)


def test_nothing_is_warned_of_where_all_is_well(card: Card) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "triton"
