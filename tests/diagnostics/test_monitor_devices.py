"""A model on two devices: the same numbers as on one, and nothing waits for a device before the report."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

COMMON = textwrap.dedent(
    """
    import sys
    import other_device
    import pytest
    import tiny_gpt
    import torch
    from attnscale import Monitor, QKClip

    registered = other_device.register()

    def build(*elsewhere):
        model = tiny_gpt.build(layers=3)
        for index in elsewhere:
            block = model.blocks[index].to(other_device.PLACE)
            block.register_forward_pre_hook(lambda module, arguments: (arguments[0].to(other_device.PLACE),))
            block.register_forward_hook(lambda module, arguments, out: out.to("cpu"))
        return model
    """
)

NUMBERS = textwrap.dedent(
    """
    def reported(model, recompute):
        model.recompute = recompute
        with Monitor(model, every=1, rows=8, alerts=None) as monitor:
            for seed in range(2):
                model.loss(tiny_gpt.batch(seed)).backward()
            return monitor.step(0)

    for recompute in (None, "reentrant", "non-reentrant"):
        expected = reported(build(), recompute)
        assert len(expected) == 6 and all(record.backward for record in expected)
        for elsewhere in ((1,), (0, 2), (0, 1, 2)):
            for record, other in zip(expected, reported(build(*elsewhere), recompute), strict=True):
                assert (record.layer, record.head) == (other.layer, other.head)
                assert record.scalars == pytest.approx(other.scalars, rel=1e-4, abs=1e-6)
                for phase in ("forward", "backward"):
                    assert getattr(record, phase).keys() == getattr(other, phase).keys()
                    for name, summary in getattr(record, phase).items():
                        # A tie of two scores, or nearly one, is a matter of rounding in the layers before.
                        close = 0.05 if name in ("accumulation", "criticality") else 2e-4
                        assert summary == pytest.approx(getattr(other, phase)[name], rel=close, abs=1e-6), name
    """
)

WAITS = textwrap.dedent(
    """
    def waits_of(act):
        other_device.waits.clear()
        act()
        return list(other_device.waits)

    model = build(0, 1)
    plain = waits_of(lambda: model.loss(tiny_gpt.batch()).backward())
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        assert waits_of(lambda: model.loss(tiny_gpt.batch()).backward()) == plain
        assert waits_of(lambda: monitor.step(0)) == ["aten::_to_copy"]
    with Monitor(model, every=10, rows=8, alerts=None) as monitor:
        monitor.step(0)  # the next steps are tracked, not measured
        assert waits_of(lambda: model.loss(tiny_gpt.batch()).backward()) == plain
        assert waits_of(lambda: (monitor.max_logits(), monitor.step(1))) == []
    inner = {f"blocks.{index}.attention": block.inner for index, block in enumerate(model.blocks)}
    with QKClip(model, tau=0.01, projections=inner) as clip:
        assert waits_of(lambda: model.loss(tiny_gpt.batch()).backward()) == plain
        assert len(clip.step()) == 6
    """
)

MEASURES = textwrap.dedent(
    """
    from dataclasses import replace
    from test_rows import RULES, call_of
    from torch.utils._pytree import tree_leaves
    from attnscale.statistics.rows.quantities import measure_quantities, score_gradients

    def moved(call):
        fields = {name: getattr(call, name) for name in ("query", "key", "value", "beta", "sinks")}
        context = call.context
        rules = {name: getattr(context, name) for name in ("slot", "first", "last", "padding", "mask")}
        there = lambda x: x.to(other_device.PLACE) if isinstance(x, torch.Tensor) else x
        rules = {name: there(x) for name, x in rules.items()}
        context = replace(context, device=torch.device(other_device.PLACE), **rules)
        return replace(call, context=context, **{name: there(x) for name, x in fields.items()})

    for rule, arguments in RULES.items():
        for beta in (None, -1.5):
            call, upstream = call_of(arguments, kv_heads=2)
            call = call if beta is None else replace(call, beta=beta)
            measures = measure_quantities(call)
            gradients = score_gradients(call, upstream, measures)
            there = moved(call)
            found = measure_quantities(there)
            answers = score_gradients(there, upstream.to(other_device.PLACE), found)
            for one, other in zip(*map(tree_leaves, ((measures, gradients), (found, answers))), strict=True):
                assert other.device == torch.device(other_device.PLACE)
                torch.testing.assert_close(one, other.cpu(), equal_nan=True, rtol=1e-5, atol=1e-5)

    with pytest.raises(RuntimeError, match="two devices"):
        score_gradients(replace(there, value=call.value), upstream.to(other_device.PLACE), found)
    """
)


SCRIPTS = {"numbers": NUMBERS, "waits": WAITS, "measures": MEASURES}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """What each script raised, by its name: in one process of their own, as devices are registered for good."""
    program = (
        f"import json, sys, traceback\nsys.path[:0] = {[str(TESTS), str(TESTS / 'statistics')]!r}\n{COMMON}\n"
        f"failures = {{}}\nfor name, script in {SCRIPTS!r}.items():\n"
        "    try:\n        exec(script, dict(globals()))\n"
        "    except BaseException:\n        failures[name] = traceback.format_exc()\n"
        "print(json.dumps(failures))\nother_device.leave()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_on_two_devices(name: str, failures: dict[str, str]) -> None:
    assert failures.get(name, "") == ""
