"""mypy accepts the calls that work and refuses the ones that do not, and so do the functions themselves."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import attnscale
import attnscale_kernels

REPOSITORY = Path(__file__).parents[1]
ROOTS = [str(Path(package.__file__).parents[1]) for package in (attnscale, attnscale_kernels)]
CALLS = """import attnscale
import torch
from torch import Tensor

q = torch.randn(1, 2, 8, 4)
attend = attnscale.ScaledDotProductAttention("log")

output: Tensor = attnscale.scaled_dot_product_attention(q, q, q, None, 0.0, True, policy="log", window=4)
measured = attnscale.attention_with_stats(q, q, q, is_causal=True, policy="log", window=(4, None))
entropy: Tensor = measured.stats.entropy.mean()
chosen: str = attnscale.explain_dispatch(q, q, q, softcap=30.0, backend="auto").chosen
weights: Tensor = attnscale.attention_weights(q, q, is_causal=True, key_padding=torch.zeros(8, dtype=torch.bool))
n: Tensor = attnscale.visible_keys(4, 4, is_causal=True, window=3)
same: Tensor = attend(q, q, q, is_causal=True, cache_offset=2)
request = attnscale.StatsRequest(accumulation="bracket")
also: Tensor = attnscale.attention_with_stats(q, q, q, None, 0.0, True, None, False, request=request).output
accumulation = attnscale.attention_with_stats(q, q, q, request=request).stats.accumulation
scale: Tensor | None = None if accumulation is None else accumulation.middle
largest: Tensor = attnscale.row_statistics(q, request=request).merge(measured.stats).w_max > 0.5

measured.stats.gap_counts.sum()  # wrong
attnscale.scaled_dot_product_attention(q, q, q, widow=4)  # wrong
attnscale.attention_with_stats(q, q, q, widow=4)  # wrong
attnscale.attention_with_stats(q, q, q, window="4")  # wrong
attnscale.attention_with_stats(q, q, is_causal=True)  # wrong
attnscale.attention_with_stats(q, q, q, request="all")  # wrong
attnscale.explain_dispatch(q, q, q, backend=1)  # wrong
attnscale.attention_weights(q, q, softcap="30")  # wrong
attnscale.attention_weights(q, q, backend="sdpa")  # wrong
attnscale.visible_keys(4, 4, causal=True)  # wrong
attnscale.visible_keys("4", 4)  # wrong
attend.forward(q, q, q, widow=4)  # wrong
attend.forward(q, q, q, policy="log")  # wrong
"""


def test_mypy_checks_a_users_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(CALLS, encoding="utf-8")
    # With the repository's own options, and so with the cache of the type check before.
    code = f"from mypy import api; print(api.run(['--config-file=pyproject.toml', {str(program)!r}])[0])"
    environment = dict(os.environ, MYPYPATH=os.pathsep.join(ROOTS))
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=REPOSITORY, timeout=900
    )
    errors = {int(line.split(":")[1]) for line in finished.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")}
    assert errors == wrong, textwrap.indent(finished.stdout + finished.stderr, "    ")


# What the snippets of a README take from the ones before.
BEFORE = """import attnscale
import torch
import transformers

q = k = v = torch.randn(1, 8, 64, 16)
path = "folder"
tokens = torch.randint(1, 64, (1, 32))
"""
# Packages of others, whose types are not our concern.
OTHERS = """[mypy]
strict = True
[mypy-transformers.*,peft.*,lm_eval.*,triton.*]
follow_imports = skip
ignore_missing_imports = True
"""


def test_mypy_accepts_every_snippet_in_a_strict_project_of_a_user(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(OTHERS, encoding="utf-8")
    readmes = [REPOSITORY / "README.md"]
    readmes += [path for part in ("attnscale", "kernels") for path in sorted((REPOSITORY / part).rglob("README.md"))]
    count = 0
    for readme in readmes:
        for code in re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
            examples = doctest.DocTestParser().get_examples(code)
            code = "".join(example.source for example in examples) or code
            name = f"{readme.parent.name}_{count}.py"
            (tmp_path / name).write_text(BEFORE + code, encoding="utf-8")
            count += 1
    assert count > 15
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(ROOTS))
    finished = subprocess.run(
        [sys.executable, "-m", "mypy", "."], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=900
    )
    assert finished.stdout.startswith("Success"), textwrap.indent(finished.stdout + finished.stderr, "    ")


@pytest.mark.parametrize(
    "call",
    [
        lambda q, **k: attnscale.scaled_dot_product_attention(q, q, q, **k),
        lambda q, **k: attnscale.attention_with_stats(q, q, q, **k),
        lambda q, **k: attnscale.explain_dispatch(q, q, q, **k),
        lambda q, **k: attnscale.attention_weights(q, q, **k),
        lambda q, **k: attnscale.visible_keys(2, 2, **k),
        lambda q, **k: attnscale.ScaledDotProductAttention("log")(q, q, q, **k),
    ],
    ids=["attention", "stats", "explain", "weights", "visible_keys", "module"],
)
def test_an_unknown_keyword_is_named(call) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'widow'"):
        call(torch.randn(1, 1, 2, 4), widow=4)


@pytest.mark.parametrize("function", [attnscale.attention_with_stats, attnscale.explain_dispatch])
def test_arguments_are_those_of_the_drop_in_function(function) -> None:
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(TypeError, match="positional argument"):
        function(q, q, q, None, 0.0, False, None, False, "log")
    with pytest.raises(TypeError, match="multiple values"):
        function(q, q, q, None, attn_mask=None)
    with pytest.raises(TypeError, match=r"missing .* required"):
        function(q, q)
