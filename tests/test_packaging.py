"""What the wheel holds, that it works where only torch and einops are, and that `kernels/` shadows nobody."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import attnscale

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"attnscale": ROOT / "attnscale", "attnscale_kernels": ROOT / "kernels" / "attnscale_kernels"}
NOT_SOURCE = (".*", "build", "dist", "*.egg-info", "__pycache__")


def fresh(*arguments: str, cwd: Path, path: Iterable[Path] = ()) -> str:
    """Output of a new interpreter that finds modules in `path`, and whatever is installed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    finished = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing is left in the repository."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    path = tmp_path_factory.mktemp("source") / "attnscale"
    shutil.copytree(ROOT, path, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return path


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built without network."""
    built = tmp_path_factory.mktemp("built")
    fresh("-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(source), cwd=built)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is unpacked into."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that an editable wheel is unpacked into."""
    built, folder = (tmp_path_factory.mktemp(name) for name in ("built", "site"))
    hook = f"import setuptools.build_meta as backend; backend.build_editable({str(built)!r})"
    fresh("-c", hook, cwd=source)
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, files: set[str]) -> Message:
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, *, core: bool) -> set[str]:
    lines = [line for line in metadata.get_all("Requires-Dist", []) if ("extra ==" not in line) == core]
    return {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines}


def test_the_wheel_holds_the_two_packages_and_nothing_else(files: set[str]) -> None:
    top = {name.partition("/")[0] for name in files}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert len(top) == 3


def test_the_wheel_holds_every_module_there_is(files: set[str]) -> None:
    for package, folder in PACKAGES.items():
        modules = {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
        assert modules == {name for name in files if name.startswith(f"{package}/") and name.endswith(".py")}


def test_the_wheel_has_no_workshop_code(files: set[str], installed: Path) -> None:
    bench = {name.split("/")[2] for name in files if name.startswith("attnscale/bench/") and name.endswith(".py")}
    assert bench == {"__init__.py", "rows.py", "gpu"}, "what only the repository runs belongs to scripts/"
    assert not {name for name in files if name.startswith("scripts/") or name.endswith(("resources.json", "tiles.csv"))}
    imports = re.compile(r"^\s*(from|import) scripts\b", re.MULTILINE)
    modules = [path for package in PACKAGES for path in (installed / package).rglob("*.py")]
    assert modules
    assert [path.name for path in modules if imports.search(path.read_text(encoding="utf-8"))] == []


def test_the_wheel_holds_what_the_page_of_a_report_is_made_of(files: set[str]) -> None:
    parts = {path.name for path in (ROOT / "attnscale" / "report" / "assets").iterdir()}
    assert parts == {Path(name).name for name in files if name.startswith("attnscale/report/assets/")}
    assert {"page.html", "page.css", "app.js"} <= parts


def test_the_wheel_holds_the_tasks_for_lm_eval(files: set[str]) -> None:
    tasks = {path.name for path in (ROOT / "attnscale" / "lab" / "lm_eval_tasks").glob("*.yaml")}
    assert tasks == {Path(name).name for name in files if re.fullmatch(r"attnscale/lab/lm_eval_tasks/.*\.yaml", name)}
    assert len(tasks) == 3


def test_the_wheel_holds_the_profiles_of_known_cards(files: set[str]) -> None:
    profiles = {path.name for path in (ROOT / "attnscale" / "bench" / "gpu" / "profiles").glob("*.yaml")}
    assert profiles == {Path(name).name for name in files if name.startswith("attnscale/bench/gpu/profiles/")}
    assert len(profiles) == 12


def test_both_packages_are_typed(files: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= files


def test_the_wheel_carries_the_licence_and_the_readme(files: set[str], metadata: Message) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_the_core_needs_torch_and_einops_only(metadata: Message) -> None:
    assert requirements(metadata, core=True) == {"torch", "einops"}


def test_the_extras_are_the_documented_ones(metadata: Message) -> None:
    extras = {
        "hf",
        "log",
        "wandb",
        "trackio",
        "mlflow",
        "report",
        "cli",
        "bench",
        "triton",
        "export",
        "eval",
        "docs",
        "dev",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert {"rich", "pyyaml", "triton", "transformers"} <= {name.lower() for name in requirements(metadata, core=False)}


def test_the_version_of_the_wheel_is_that_of_the_package(installed: Path, metadata: Message, tmp_path: Path) -> None:
    code = "import attnscale, attnscale_kernels as k; print(attnscale.__version__, attnscale.__file__, k.__file__)"
    version, *where = fresh("-c", code, cwd=tmp_path, path=[installed]).split()
    assert version == metadata["Version"]
    assert [Path(path).parent for path in where] == [installed / name for name in PACKAGES]


# An installation without what the extras `cli`, `hf`, `report` and `triton` bring.
BARE = """
import contextlib, io, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "yaml", "jsonargparse", "transformers", "triton", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
from attnscale.cli import main

def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()
"""


def test_the_core_commands_of_a_plain_installation_work(installed: Path, metadata: Message, tmp_path: Path) -> None:
    code = f"""{BARE}
from attnscale.cli.parser import COMMANDS
from attnscale.policies import POLICIES

assert run("--version") == (0, "attnscale {metadata["Version"]}\\n", "")
assert run() == run("--help")
assert run()[0] == 0 and "doctor" in run()[1]
for command in COMMANDS:
    assert run(command, "--help")[::2] == (0, ""), run(command, "--help")
code, out, err = run("doctor")
assert (code, err) == (0, "") and "blockwise" in out and "pip install triton" in out, out + err
code, out, err = run("policies")
assert (code, err) == (0, "") and all(name in out for name in POLICIES), out + err
"""
    fresh("-c", code, cwd=tmp_path, path=[installed])
    assert list(tmp_path.iterdir()) == []


def test_the_other_commands_name_the_packages_to_install(installed: Path, metadata: Message, tmp_path: Path) -> None:
    """By the names that an index has: attnscale itself is on none."""
    code = f"""{BARE}
for words in ("evaluate m", "run experiment/smollm2", "watch m", "bench gpu", "theory all", "demo"):
    code, out, err = run(*words.split())
    assert (code, out) == (2, ""), out
    print(err, end="")
import attnscale
try:
    attnscale.build_policy("policy/log.yaml")
except ImportError as error:
    print(error)
try:
    attnscale.hf
except ImportError as error:
    print(error)
"""
    *lines, of_hf = fresh("-c", code, cwd=tmp_path, path=[installed]).splitlines()
    declared = metadata.get_all("Requires-Dist", [])
    for extra, said in [("cli", line) for line in lines] + [("hf", of_hf)]:
        wanted = [line.partition(";")[0].strip() for line in declared if line.endswith(f'extra == "{extra}"')]
        assert shlex.split(said.partition(": pip install ")[2]) == wanted


def test_the_wheel_holds_the_configurations(files: set[str]) -> None:
    shipped = {name.removeprefix("attnscale/") for name in files if name.startswith("attnscale/configs/")}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}


CONFIGURED = """
from pathlib import Path
import attnscale
from attnscale.cli.evaluate import EXPERIMENTS, read_experiment
from attnscale.diagnostics import Thresholds

names = ("configs/experiment/smollm2.yaml", "experiment/smollm2")
long, short = (read_experiment(Path(name), [], EXPERIMENTS)[0] for name in names)
assert long == short
assert attnscale.build_policy("configs/policy/llama4.yaml").name == "llama4"
assert Thresholds.read("monitor/strict").collapsed == 0.9
Path("configs/policy").mkdir(parents=True)
Path("configs/policy/llama4.yaml").write_text("name: log\\n")
assert attnscale.build_policy("configs/policy/llama4.yaml").name == "log"
print(attnscale.__file__)
"""


def test_the_configurations_are_found_by_name_unless_the_user_has_a_file(installed: Path, tmp_path: Path) -> None:
    assert fresh("-c", CONFIGURED, cwd=tmp_path, path=[installed]).startswith(str(installed))


def test_an_editable_installation_is_a_folder_that_type_checkers_can_read(editable: Path, tmp_path: Path) -> None:
    (line,) = (path.read_text().strip() for path in editable.glob("*.pth"))
    folder = Path(line)
    assert {path.name for path in folder.iterdir()} == set(PACKAGES)
    assert fresh("-c", CONFIGURED, cwd=tmp_path, path=[folder]).startswith(str(folder))
    pytest.importorskip("mypy")
    # What mypy asks the interpreter for: the path after site-packages has been read, with its .pth files.
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(editable)!r})\n")
    (tmp_path / "program.py").write_text("import attnscale\nimport attnscale_kernels\n")
    code = "from mypy import api; print(*api.run(['--strict', '--follow-imports=skip', 'program.py']))"
    assert fresh("-c", code, cwd=tmp_path, path=[tmp_path]).startswith("Success")


def test_the_changelog_knows_the_version() -> None:
    """The newest release in it is this one, with a date; what is not released yet stands above."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(attnscale.__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_the_version_stands_in_one_place() -> None:
    assert not re.search(
        r"^version *=", (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.")[0], re.MULTILINE
    )


def test_the_command_is_installed_with_the_wheel(wheel: Path, files: set[str]) -> None:
    (name,) = (name for name in files if name.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert "attnscale = attnscale.cli:main" in archive.read(name).decode()


def test_the_folder_of_kernels_is_not_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "kernels").glob("*.py")] == []


WHERE = """
import importlib.util
spec = importlib.util.find_spec("kernels")
print(spec.origin if spec else None, *(spec.submodule_search_locations or ()) if spec else ())
"""


def test_an_installation_does_not_make_kernels_importable(tmp_path: Path) -> None:
    assert str(ROOT / "kernels") not in fresh("-c", WHERE, cwd=tmp_path)


def test_from_the_root_of_the_repository_kernels_is_no_module_of_ours() -> None:
    # Python turns any folder on its path into a namespace; that has no origin, runs no code and yields to a package.
    origin = fresh("-c", WHERE, cwd=ROOT).split()[0]
    assert origin == "None" or ROOT / "kernels" not in Path(origin).parents


@pytest.mark.parametrize("path", [(), (ROOT,), (ROOT, ROOT / "kernels")], ids=["cwd", "root", "both roots"])
def test_the_kernels_package_of_others_wins_from_the_root_of_the_repository(
    path: tuple[Path, ...], tmp_path: Path
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("owner = 'somebody else'\n")
    # The current folder and `path` come before the fake on sys.path, so that only being a package lets it win.
    code = "import kernels; print(kernels.owner, kernels.__file__, sep='|')"
    owner, file = fresh("-c", code, cwd=ROOT, path=[*path, tmp_path]).split("|")
    assert owner == "somebody else"
    assert Path(file) == tmp_path / "kernels" / "__init__.py"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_does_not_take_our_folder_for_the_kernels_package() -> None:
    code = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    installed = any(importlib.metadata.distributions(name="kernels"))
    assert fresh("-c", code, cwd=ROOT) == str(installed)
