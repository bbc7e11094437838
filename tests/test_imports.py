"""`import attnscale` needs torch, and touches nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import attnscale
import attnscale_kernels

ROOTS = [str(Path(package.__file__).parents[1]) for package in (attnscale, attnscale_kernels)]
LOGGING = ("tensorboard", "wandb", "trackio", "mlflow")  # not pandas: torch asks where it is, which Block forbids
OPTIONAL = ("triton", "transformers", "yaml", "rich", "matplotlib", "accelerate", *LOGGING)
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""


def fresh(code: str, *options: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with some packages made impossible to import."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*ROOTS, os.environ.get("PYTHONPATH", "")]))
    program = BLOCK.format(blocked=blocked) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, env=environment, timeout=120
    )


class Imported(NamedTuple):
    """What a new interpreter has after `import torch`, `import attnscale` and `import attnscale.theory.families`."""

    torchs: list[str]  # modules that torch has loaded
    added: list[str]  # by attnscale
    cuda: bool  # whether it was initialised
    added_by_theory: list[str]
    printed: str


@pytest.fixture(scope="module")
def imported() -> Imported:
    finished = fresh(
        """
        import json, torch
        before = set(sys.modules)
        import attnscale
        package = set(sys.modules)
        cuda = torch.cuda.is_initialized()
        import attnscale.theory.families
        print(json.dumps([sorted(before), sorted(package - before), cuda, sorted(set(sys.modules) - package)]))
        """
    )
    assert finished.returncode == 0, finished.stderr
    *said, last = finished.stdout.splitlines()
    return Imported(*json.loads(last), printed="".join(said) + finished.stderr)


def test_nothing_is_imported_that_torch_does_not_import(imported: Imported) -> None:
    torchs, added = ({name.partition(".")[0] for name in names} for names in (imported.torchs, imported.added))
    assert added - torchs - set(sys.stdlib_module_names) == {"attnscale", "attnscale_kernels"}


def test_no_submodule_of_torch_is_loaded_for_the_compiler(imported: Imported) -> None:
    # torch._dynamo and torch._inductor take seconds and would be paid by everyone who imports the package.
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed", "sympy")
    assert [name for name in imported.added if name.startswith(heavy)] == []


def test_theory_and_lab_are_imported_by_those_who_ask_for_them(imported: Imported) -> None:
    assert [name for name in imported.added if name.startswith(("attnscale.theory", "attnscale.lab"))] == []
    assert "attnscale.theory.families" in imported.added_by_theory
    assert "matplotlib" not in imported.added + imported.added_by_theory


def test_importing_touches_no_device_and_says_nothing(imported: Imported) -> None:
    assert not imported.cuda
    assert imported.printed == ""


def test_importing_warns_of_nothing() -> None:
    finished = fresh(
        "import attnscale, attnscale.bench.rows, attnscale.cli, attnscale.lab, attnscale.theory, attnscale_kernels",
        "-W",
        "error",
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""


def test_everything_but_files_works_without_any_optional_package() -> None:
    finished = fresh(
        """
        import torch
        import attnscale

        q = torch.randn(1, 2, 8, 4)
        attnscale.scaled_dot_product_attention(q, q, q, is_causal=True, policy="log", softcap=30.0)
        print(attnscale.explain_dispatch(q, q, q, policy={"name": "power", "exponent": 0.5}).chosen)
        model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        with attnscale.convert(model, "ssmax"):
            model(torch.randn(1, 4, 8)).sum().backward()
        import attnscale.bench.rows, attnscale.lab
        """,
        blocked=OPTIONAL,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["sdpa"]


def test_a_call_without_its_package_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("name: log\n")
    finished = fresh(
        f"""
        import attnscale
        for call in (
            lambda: attnscale.build_policy({str(tmp_path / "policy.yaml")!r}),
            lambda: attnscale.hf.apply(None, "log"),
        ):
            try:
                call()
            except ImportError as error:
                print(type(error).__name__, error)
        """,
        blocked=("yaml", "transformers"),
    )
    assert finished.returncode == 0, finished.stderr
    of_yaml, of_hf = finished.stdout.splitlines()
    assert of_yaml.startswith("MissingDependencyError a YAML file needs yaml: pip install rich pyyaml ")
    assert of_hf.startswith("MissingDependencyError attnscale.hf needs transformers: pip install 'transformers>=")


def test_every_public_name_exists() -> None:
    assert attnscale.__all__ == sorted(attnscale.__all__)
    assert [name for name in attnscale.__all__ if not hasattr(attnscale, name)] == []
    assert [name for name in attnscale_kernels.__all__ if not callable(getattr(attnscale_kernels, name))] == []


def test_a_star_import_gives_the_public_names_and_no_others() -> None:
    names: dict[str, object] = {}
    exec("from attnscale import *", names)
    assert set(names) - {"__builtins__"} == set(attnscale.__all__)
