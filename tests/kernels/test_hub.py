"""The kernels as loaded by the HuggingFace Hub: from a path, under a name chosen by the loader."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnscale_kernels

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(attnscale_kernels.__file__).parent
HUB = Path(sys.prefix) / "hub"  # `make setup` installs HuggingFace's kernels here
LOADER = (HUB / "kernels").is_dir()

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


@pytest.mark.skipif(LOADER, reason="HuggingFace's kernels is installed, and loads it under two names")
def test_it_loads_under_another_name_and_runs() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LOAD, str(FOLDER)], capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 0, finished.stderr


# HuggingFace's own loader: two builds, where the second multiplies its scale by 2.
LOAD_TWO = """
import sys
from pathlib import Path

import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, register_kernel_mapping
from kernels import use_kernel_forward_from_hub
from torch.nn import functional as F

paths = [Path(path) for path in sys.argv[1:]]
loaded = [get_local_kernel(path) for path in paths]
assert loaded[0].__name__ != loaded[1].__name__
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, 5, 16, generator=generator).requires_grad_() for _ in range(3))


def check(attend, scale):
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    found = attend()
    torch.testing.assert_close(found, expected)
    pairs = zip(torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)))
    for one, other in pairs:
        torch.testing.assert_close(one, other)


one = torch.ones(1, 1, 1)
for _ in range(2):  # in turns: neither has replaced the other
    for module, scale in zip(loaded, (0.25, 0.5)):
        check(lambda: module.flash_attention(q, k, v, one, module.Visibility(right=0), scale=0.25).out, scale)


@use_kernel_forward_from_hub("ScaledAttention")
class Written(torch.nn.Module):
    def forward(self, query, key, value, beta, is_causal=False, scale=None):
        raise AssertionError("the layer of the kernel should take this place")


register_kernel_mapping({"ScaledAttention": {"cpu": LocalLayerRepository(paths[0], layer_name="ScaledAttention")}})
layer = kernelize(Written(), mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
check(lambda: layer(q, k, v, one, is_causal=True), 0.25)
assert "attnscale_kernels" not in sys.modules
"""


def hub_kernel():
    """The script that writes the Hub repository."""
    spec = importlib.util.spec_from_file_location("hub_kernel", ROOT / "scripts" / "hub_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not LOADER, reason="HuggingFace's kernels is not installed")
def test_the_loader_of_the_hub_runs_two_builds_side_by_side(tmp_path: Path) -> None:
    script = hub_kernel()
    paths = [tmp_path / name for name in ("first", "second")]
    for path in paths:
        build = script.write(path)
    changed = build / "flash" / "op.py"
    changed.write_text(changed.read_text(encoding="utf-8").replace("scale=scale", "scale=2 * scale"), encoding="utf-8")
    metadata = build / "metadata.json"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace('"_attnscale', '"_another'), encoding="utf-8")
    # Replaces all other paths: in a checkout, `kernels` would be the folder.
    environment = os.environ | {"PYTHONPATH": str(HUB), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", LOAD_TWO, *map(str, paths)],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def test_the_build_is_the_package_with_its_metadata(tmp_path: Path) -> None:
    build = hub_kernel().write(tmp_path)
    assert build == tmp_path / "build" / "torch-universal"
    sources = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")}
    for folder in (build, tmp_path / "torch-ext" / "attnscale_kernels"):
        assert {path.relative_to(folder) for path in folder.rglob("*.py")} == sources
    metadata = json.loads((build / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["name"] == "attnscale-kernels"
    assert metadata["id"].isidentifier()
    assert metadata["license"] == "Apache-2.0"


def test_another_source_gets_another_id(tmp_path: Path) -> None:
    script = hub_kernel()
    first, again = (json.loads((script.write(tmp_path) / "metadata.json").read_text()) for _ in range(2))
    assert again == first
    (tmp_path / "build" / "torch-universal" / "launch.py").write_text("", encoding="utf-8")
    general = {"name": "attnscale-kernels", "version": 1, "license": "", "upstream": "", "backends": ["cuda"]}
    assert script._metadata(general, tmp_path / "build" / "torch-universal")["id"] != first["id"]


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
