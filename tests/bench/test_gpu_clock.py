"""The clock of `attnscale bench gpu` on a simulated device with its own timeline. Not run on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnscale.bench.gpu import machine
from attnscale.bench.gpu.machine import (
    FIRST_HOLD,
    LONGEST_HOLD,
    DeviceClock,
    HostClock,
    Telemetry,
    interleaved,
    read_telemetry,
)
from attnscale.errors import BackendError

CPU = torch.device("cpu")
GHZ = 2.0


class Device:
    """A host that launches and a device that works through a queue, each with its own time in seconds."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.log: list[str] = []
        self.holds: list[int] = []

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.host, self.busy_until) + seconds

    def sleep(self, cycles: int) -> None:
        self.log.append("hold")
        self.holds.append(cycles)
        self.launch(cycles / (GHZ * 1e9))

    def synchronize(self, device: object = None) -> None:
        self.log.append("wait")
        self.host = max(self.host, self.busy_until)

    def kernel(self, *, host: float, device: float, waits: bool = False) -> Callable[[], object]:
        """A function whose launch takes the host some time, before the device gets something to do."""

        def call() -> None:
            self.log.append("call")
            self.host += host
            self.launch(device)
            if waits:
                self.synchronize()

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """In place of torch's."""
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self) -> None:
            made.log.append("record")
            self.at = max(made.host, made.busy_until)

        def query(self) -> bool:
            return made.host >= self.at

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(machine, "FLUSH_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    return made


def test_the_cache_is_flushed_and_the_device_held_before_the_first_event(device: Device) -> None:
    timer = DeviceClock(CPU)
    timer.room.fill_(1)
    assert timer.seconds(device.kernel(host=0.0, device=1e-5)) == pytest.approx(1e-5)
    assert device.log == ["hold", "record", "call", "record", "wait"]
    assert not timer.room.any()


@pytest.mark.parametrize("host", [1e-6, 5e-4, 5e-3, 5e-2])
def test_the_time_is_the_devices_however_slow_the_host_is(device: Device, host: float) -> None:
    timer = DeviceClock(CPU)
    assert timer.seconds(device.kernel(host=host, device=2e-5)) == pytest.approx(2e-5)
    assert device.holds[-1] / (GHZ * 1e9) > host


def test_a_hold_that_was_long_enough_is_kept_for_the_next(device: Device) -> None:
    timer = DeviceClock(CPU)
    slow = device.kernel(host=5e-3, device=2e-5)
    timer.seconds(slow)
    assert device.holds == [FIRST_HOLD, 2 * FIRST_HOLD, 4 * FIRST_HOLD, 8 * FIRST_HOLD]
    timer.seconds(slow)
    assert device.holds[4:] == [8 * FIRST_HOLD]


def test_a_function_that_waits_for_the_device_cannot_be_timed(device: Device) -> None:
    timer = DeviceClock(CPU)
    with pytest.raises(BackendError, match="within a call"):
        timer.seconds(device.kernel(host=0.0, device=1e-5, waits=True))
    assert device.holds[-1] == LONGEST_HOLD
    assert timer.hold == FIRST_HOLD


def test_memory_is_that_of_the_second_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: made.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4096)
    made = device.log

    def function() -> Tensor:
        made.append("call")
        return torch.ones(1)

    result, peak = DeviceClock(CPU).peak(function)
    assert (result.item(), peak) == (1.0, 3096)
    assert made == ["call", "wait", "reset", "call", "wait"]


def test_a_dry_run_computes_once_what_it_times_often() -> None:
    calls: list[str] = []

    def function() -> Tensor:
        calls.append("call")
        return torch.ones(1)

    timer = HostClock()
    assert timer.peak(function) == (torch.ones(1), None)
    assert timer.seconds(function) == timer.seconds(function) > 0
    assert calls == ["call"]


def test_the_state_of_a_card_is_read_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_500)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    assert DeviceClock.telemetry(SimpleClock()) == Telemetry(1980.0, 650.5, 61.0)


def test_on_rocm_power_comes_in_watts_and_0_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 740)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    assert read_telemetry(CPU) == Telemetry(None, 740.0, 61.0)


class SimpleClock(DeviceClock):
    """Without memory to flush."""

    def __init__(self) -> None:
        self.device = CPU


def test_what_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py is not installed")

    for name in ("clock_rate", "power_draw", "temperature"):
        monkeypatch.setattr(torch.cuda, name, missing)
    assert read_telemetry(CPU) == Telemetry(None, None, None)
    assert read_telemetry(CPU).known() == {}


class RecordingClock(HostClock):
    """Seconds as told, and a record of who ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def seconds(self, function: Callable[[], object]) -> float:
        name, seconds = function()  # type: ignore[misc]
        self.calls.append(name)
        return float(seconds)


def lasting(name: str, *seconds: float) -> Callable[[], tuple[str, float]]:
    durations = iter(seconds)
    return lambda: (name, next(durations))


def test_every_round_runs_all_in_changing_order_after_a_warm_up() -> None:
    fake = RecordingClock()
    rounds = 12
    functions = {name: lasting(name, 100.0, *map(float, range(rounds))) for name in "abc"}
    samples = interleaved(functions, fake, warm_up=1, rounds=rounds)
    assert samples == {name: list(map(float, range(rounds))) for name in "abc"}
    warm_up, measured = fake.calls[:3], fake.calls[3:]
    assert warm_up == ["a", "b", "c"]
    in_rounds = [tuple(measured[start : start + 3]) for start in range(0, 3 * rounds, 3)]
    assert {tuple(sorted(names)) for names in in_rounds} == {("a", "b", "c")}
    assert len(set(in_rounds)) > 2
