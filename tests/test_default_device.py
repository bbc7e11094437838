"""No tensor is made on the default device, which may be one where nothing can be computed.

Parameters and buffers are the exception: modules are built on the default device, as those of torch.nn are.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
from catalogue import ARGUMENTS, build
from oracle import tensors
from torch.utils._device import DeviceContext, _device_constructors

import attnscale
from attnscale import Monitor, StatsRequest, attention_with_stats, build_policy, scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
FACTORIES = {function.__name__ for function in _device_constructors()}


def without_device(path: Path) -> list[str]:
    """Calls of torch's factories that leave the device to the default, but for parameters and buffers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    built = {
        id(part)
        for call in calls
        if ast.unparse(call.func).endswith(("nn.Parameter", "register_buffer"))
        for part in ast.walk(call)
    }
    return [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for call in calls
        if ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES}
        and id(call) not in built
        and not {"device", "out", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_is_made_on_a_device_that_is_named():
    folders = [ROOT / "attnscale", ROOT / "kernels" / "attnscale_kernels"]
    assert [
        place for folder in folders for path in sorted(folder.rglob("*.py")) for place in without_device(path)
    ] == []


class Refusal(DeviceContext):
    """A default device that refuses every tensor."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _device_constructors() and (kwargs or {}).get("device") is None:
            raise AssertionError(f"{func.__name__} on the default device")
        return func(*args, **(kwargs or {}))


RULES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 5},
    "documents": {"is_causal": True, "document_ids": torch.tensor([0] * 7 + [1] * 9)},
    "packed": {"is_causal": True, "cu_seqlens": torch.tensor([0, 7, 16])},
    "padding": {"key_padding": torch.arange(16) > 11},
    "offset": {"is_causal": True, "cache_offset": 0, "positions": torch.arange(16)},
    "mask": {"attn_mask": torch.ones(16, 16, dtype=torch.bool).tril()},
    "bias": {"attn_mask": torch.zeros(16, 16)},
}
EVERYTHING = {"gap_thresholds": (0.5, 2.0), "min_rank": 2}


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_calls_run_under_a_default_device_that_refuses_everything(rules, backend):
    q, k, v = (x.requires_grad_() for x in tensors((2, 4, 16, 16), (2, 2, 16, 16), torch.float32))
    with Refusal():
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True, policy="log", backend=backend, **rules)
        out.sum().backward()
        for kind in ("bracket", "exact"):
            for rows in (None, 4):
                request = StatsRequest(accumulation=kind, rows=rows, **EVERYTHING)
                attention_with_stats(
                    q, k, v, enable_gqa=True, policy="gap_adaptive", request=request, backend=backend, **rules
                )


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_every_policy_does(name):
    policy = build(name)
    q, k, v = tensors((2, 4, 16, 16), (2, 4, 16, 16), torch.float32)
    with Refusal():
        scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy)


def test_matrices_and_modules_do():
    scores, x = torch.randn(2, 4, 8, 8), torch.randn(2, 8, 16)
    attention = attnscale.MultiheadAttention(16, 4, batch_first=True, policy="log")
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    with Refusal():
        attnscale.softmax(scores, 2.0, mask=visible, request=StatsRequest(accumulation="exact"))
        attnscale.row_statistics(scores, 2.0, visible, StatsRequest(accumulation="bracket"))
        attnscale.accumulation_scale(scores)
        attention(x, x, x, is_causal=True, attn_mask=~visible)
        build_policy("log", reference_length=64)(7)


@pytest.mark.parametrize("policy", ["log", {"name": "gap_adaptive", "scope": "head", "num_heads": 2}], ids=str)
def test_a_monitor_loses_no_step(policy):
    model = tiny_gpt.build(policy=build_policy(policy))
    batch = tiny_gpt.batch()
    with Monitor(model, every=1, rows=4) as monitor, Refusal():
        for step in range(2):
            model.loss(batch).backward()
            records = monitor.step(step)
            assert {record.layer for record in records} == set(monitor.layers)
