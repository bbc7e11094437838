"""`import attnscale` needs torch and einops, and touches nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

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


def test_nothing_is_imported_that_torch_does_not_import_but_einops() -> None:
    finished = fresh(
        """
        import torch
        before = {name.partition(".")[0] for name in sys.modules}
        import attnscale
        after = {name.partition(".")[0] for name in sys.modules}
        print(*sorted(after - before - set(sys.stdlib_module_names)))
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["attnscale", "attnscale_kernels", "einops"]


def test_no_submodule_of_torch_is_loaded_for_the_compiler() -> None:
    # torch._dynamo and torch._inductor take seconds and would be paid by everyone who imports the package.
    finished = fresh(
        """
        import torch
        before = set(sys.modules)
        import attnscale
        heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed", "sympy")
        print(*sorted(name for name in set(sys.modules) - before if name.startswith(heavy)))
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []


def test_theory_and_lab_are_imported_by_those_who_ask_for_them() -> None:
    finished = fresh(
        """
        import attnscale
        print(*sorted(name for name in sys.modules if name.startswith(("attnscale.theory", "attnscale.lab"))))
        import attnscale.theory.families
        print("matplotlib" in sys.modules)
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["False"]


def test_importing_touches_no_device_and_says_nothing() -> None:
    finished = fresh(
        """
        import torch
        import attnscale
        print(torch.cuda.is_initialized())
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["False"]
    assert finished.stderr == ""


def test_importing_warns_of_nothing() -> None:
    finished = fresh(
        "import attnscale, attnscale.bench.cost, attnscale.cli, attnscale.lab, attnscale.theory, attnscale_kernels",
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
        import attnscale.bench.cost, attnscale.lab
        """,
        blocked=OPTIONAL,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["sdpa"]


def test_a_yaml_file_without_pyyaml_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("name: log\n")
    finished = fresh(
        f"""
        import attnscale
        try:
            attnscale.build_policy({str(tmp_path / "policy.yaml")!r})
        except ImportError as error:
            print(type(error).__name__, error)
        """,
        blocked=("yaml",),
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "MissingDependencyError YAML files need PyYAML: pip install 'attnscale[cli]'"


def test_hf_without_transformers_names_the_extra() -> None:
    finished = fresh(
        """
        import attnscale
        try:
            attnscale.hf.apply(None, "log")
        except ImportError as error:
            print(type(error).__name__, error)
        """,
        blocked=("transformers",),
    )
    assert finished.returncode == 0, finished.stderr
    assert (
        finished.stdout.strip() == "MissingDependencyError attnscale.hf needs transformers: pip install 'attnscale[hf]'"
    )


def test_every_public_name_exists() -> None:
    assert attnscale.__all__ == sorted(attnscale.__all__)
    assert [name for name in attnscale.__all__ if not hasattr(attnscale, name)] == []
    assert [name for name in attnscale_kernels.__all__ if not callable(getattr(attnscale_kernels, name))] == []


def test_a_star_import_gives_the_public_names_and_no_others() -> None:
    names: dict[str, object] = {}
    exec("from attnscale import *", names)
    assert set(names) - {"__builtins__"} == set(attnscale.__all__)


@pytest.mark.parametrize(
    "arguments", [[], ["doctor"], ["bench", "--config", "plan.yaml"]], ids=["none", "doctor", "bench"]
)
def test_the_command_line_without_rich_names_the_extra_in_one_sentence(arguments: list[str]) -> None:
    finished = fresh(
        f"""
        import runpy
        sys.argv = ["attnscale", *{arguments!r}]
        runpy.run_module("attnscale", run_name="__main__")
        """,
        blocked=("rich",),
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.strip() == "attnscale: the command line needs rich: pip install 'attnscale[cli]'"
