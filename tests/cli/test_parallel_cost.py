"""`attnscale plan`: the printed estimate follows the options."""

from __future__ import annotations

import pytest

from attnscale.cli import main


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", "--length", "1M", "--parallel", "cp=8", *options]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_it_is_labelled_an_estimate(capsys):
    found = printed(capsys, "--heads", "32", "--key-heads", "8", "--device", "h100")
    assert found.startswith(
        "Estimate, not a measurement: causal attention over 1,048,576 tokens, batch 1, 32 query heads"
    )
    assert "8 key-value heads, head dimension 128, bf16, on 8 × H100. Per rank and layer:" in found


def test_memory_and_messages_are_those_of_the_tensors(capsys):
    found = printed(capsys, "--heads", "32", "--device", "h100")
    # 2^17 tokens of 32 heads of 128 in bf16 are 1 GiB: q, k, v, output, and what is held or sent besides.
    assert "│ gather │ 20.0 GiB │ 14.0 GiB │ 14.0 GiB │" in found
    assert "│ ulysses │ 8.0 GiB │ 3.5 GiB │ 3.5 GiB │" in found
    assert "│ ring │ 10.0 GiB │ 14.0 GiB │ 46.0 GiB │" in found


def test_the_time_at_peak_is_operations_over_the_published_rate(capsys):
    # 2·2·32·128·2^40/2 operations of a causal forward over 8 processes, at 989·10^12 a second.
    assert "1,138.4 ms" in printed(capsys, "--heads", "32", "--device", "h100")
    assert " ms " not in printed(capsys, "--heads", "32", "--device", "h100", "--dtype", "fp64")


def test_unavailable_methods_are_named(capsys):
    found = printed(capsys, "--heads", "12", "--dtype", "fp32")
    assert "ulysses is not available: 12 heads are not a multiple of 8 ranks." in found
    with pytest.raises(SystemExit):
        main(["plan", "--length", "1M", "--heads", "0"])
    assert "heads=0 is not accepted" in capsys.readouterr().err
