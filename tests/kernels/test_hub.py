"""The folder of kernels as the HuggingFace Hub loads one: by its path, under a name of the loader's choosing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import attnscale_kernels

FOLDER = Path(attnscale_kernels.__file__).parent

LOAD = """
import importlib.util, sys
from pathlib import Path

folder = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("hub_kernel_4f1c", folder / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
assert "triton" not in sys.modules
import torch

q = torch.randn(1, 2, 5, 16)
found = module.flash_attention(q, q, q, torch.ones(1, 1, 1), module.Visibility(right=0), scale=0.25, entropy=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.25)
torch.testing.assert_close(found.out, expected)
torch.testing.assert_close(module.row_softmax(q).weights, q.softmax(-1))
assert "attnscale_kernels" not in sys.modules
assert "attnscale" not in sys.modules
"""


def test_it_loads_under_another_name_and_runs() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LOAD, str(FOLDER)], capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 0, finished.stderr


def test_it_imports_nothing_but_torch_triton_and_the_standard_library() -> None:
    allowed = sys.stdlib_module_names | {"torch", "triton"}
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = [str(node.module).split(".")[0]]
            else:
                continue
            assert set(roots) <= allowed, (path.name, roots)
