"""What every README shows runs, and prints what it says."""

from __future__ import annotations

import ast
import builtins
import csv
import doctest
import importlib
import itertools
import math
import re
import shutil
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import attnscale
from attnscale.report.evaluation_charts import critical_points, rank_correlation
from attnscale.report.evaluation_data import read_evaluation

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / ".github/assets"
PATHS = [
    ROOT / "README.md",
    *(path for part in ("attnscale", "kernels", "scripts") for path in sorted((ROOT / part).rglob("README.md"))),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
README, BENCH, HF = TEXTS["README.md"], TEXTS["scripts/cost/README.md"], TEXTS["attnscale/hf/README.md"]
LAB = TEXTS["attnscale/lab/README.md"]
CALIBRATION = TEXTS["attnscale/lab/calibration/README.md"]
RESULTS = [text for text in TEXTS.values() if "| % of questions |" in text]  # READMEs with the table of accuracies
readmes = pytest.mark.parametrize("readme", TEXTS)


class Block(NamedTuple):
    """A snippet, and the README it stands in."""

    readme: str
    code: str

    def __str__(self) -> str:
        return f"{self.readme}: {self.code.strip().splitlines()[0][:40]}"


BLOCKS = [
    Block(readme, code)
    for readme, text in TEXTS.items()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]

# The model that the snippets name stands in the READMEs only: nothing is downloaded here.
HUB_MODEL = '"HuggingFaceTB/SmolLM2-135M"'


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in place of the one that snippets name; empty without transformers."""
    folder = tmp_path_factory.mktemp("model")
    if find_spec("transformers"):
        models = importlib.import_module("tiny_models")
        models.llama(vocab_size=256).float().save_pretrained(folder)
        models.byte_tokenizer().save_pretrained(folder)
    return folder


def names(model_folder: Path) -> dict[str, object]:
    """What the snippets before one have defined, in a size that is quick."""
    models = importlib.import_module("tiny_models") if find_spec("transformers") else None
    q, k, v = (torch.randn(1, 8, 4096, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return {
        "torch": torch,
        "path": model_folder,
        "tokens": models and models.TOKENS,
        "attnscale": attnscale,
        "transformers": models and models.transformers,
        "q": q,
        "k": k,
        "v": v,
    }


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_snippet_runs(block: Block, model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    code = block.code.replace(HUB_MODEL, repr(str(model_folder)))
    for package in ("attnscale.hf.", "peft.", "attnscale_kernels", "lm_eval"):
        if package in code:
            needed = {"attnscale.hf.": "transformers", "attnscale_kernels": "triton"}.get(package, package.strip("."))
            pytest.importorskip(needed, reason=f"{needed} is not installed")
    if "lm_eval" in code:  # it asks git, pip and nvidia-smi about the machine, which takes long
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    if "attnscale_kernels" not in code:
        # What a user sees, who has not chosen triton's interpreter as `conftest` does.
        for module in ("attnscale_kernels.availability", "attnscale.backends.triton"):
            monkeypatch.setattr(importlib.import_module(module), "interpreting", lambda: False)
    if ">>>" in code:
        parsed = doctest.DocTestParser().get_doctest(code, names(model_folder), block.readme, None, None)
        assert doctest.DocTestRunner().run(parsed).failed == 0
    else:
        exec(code, names(model_folder))


def test_calls_that_are_said_to_give_the_same_rows_do_and_the_others_do_not(model_folder: Path) -> None:
    (block,) = (block.code for block in BLOCKS if "attend = functools.partial" in block.code)
    known = names(model_folder)
    exec(block, known)
    prefill = eval("attend(q, k, v)", known)
    calls = re.findall(r"^attend\(.*?\)(?=  #)", block, re.MULTILINE)
    fewer = [call for call in calls if re.search("key_padding|cu_seqlens|window", call)]
    assert (len(calls), len(fewer)) == (7, 3)
    for call in calls:
        (rows,) = re.findall(r"attend\(q(\[.*?\])?, k", call)
        expected = eval(f"prefill{rows}", known | {"prefill": prefill})
        if call in fewer:
            assert (eval(call, known) - expected).abs().max() > 0.1, call
        else:
            torch.testing.assert_close(eval(call, known), expected)


@readmes
def test_snippets_name_nothing_that_was_not_introduced(readme: str) -> None:
    known = set(dir(builtins))
    for block in (block.code for block in BLOCKS if block.readme == readme):
        examples = doctest.DocTestParser().get_examples(block)
        tree = ast.parse("".join(example.source for example in examples) if examples else block)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
            elif isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
        assert not used - known, block


@readmes
def test_commands_of_make_are_targets(readme: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = re.findall(r"^make ([\w-]+)|`make ([\w-]+)", TEXTS[readme], re.MULTILINE)
    assert {block or line for block, line in commands} <= set(targets)


@readmes
def test_links_lead_somewhere(readme: str) -> None:
    for target in re.findall(r"\]\((?!http)(.*?)\)", TEXTS[readme]):
        file = target.partition("#")[0]
        assert (ROOT / readme).parent.joinpath(file).exists(), target


def test_the_root_is_a_map_of_what_the_folders_tell() -> None:
    for readme in TEXTS:
        assert readme == "README.md" or f"]({Path(readme).parent.as_posix()})" in README, readme


def read(name: str) -> list[dict[str, str]]:
    with (ASSETS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def has_row(text: str, name: str, *cells: str) -> bool:
    """Whether a table has a line with these cells after a first one that has the words of `name` in it."""
    found = re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE)
    return any(all(word in first for word in name.split()) and rest == " | ".join(cells) for first, rest in found)


def states(text: str, name: str, *numbers: str) -> bool:
    """Whether a paragraph that names something has these numbers, in this order."""
    for paragraph in re.split(r"\n\s*\n", text):
        rest = iter(re.findall(r"\d+(?:\.\d+)?", paragraph))
        if name in paragraph.replace("\n", " ") and all(number in rest for number in numbers):
            return True
    return False


def test_figures_are_those_of_the_committed_tables() -> None:
    rows = read("bench_cpu.csv")
    measured = {(row["provider"], row["mode"], row["metric"], row["x"]): f"{float(row['y']):.2f}" for row in rows}
    names = {name: f"`{name}`" for name in ("constant", "sqrt_log", "log", "log_squared")}
    for provider, name in {**names, "log_bf16": "`log`, bf16"}.items():
        shown = [
            measured[provider, mode, "time_ratio", length]
            for length in ("512", "2048", "8192")
            for mode in ("forward", "forward+backward")
        ]
        assert has_row(BENCH, name, *shown)
    shown = [measured["stats_all_rows", "forward", "time_ratio", length] for length in ("2048", "4096", "8192")]
    assert has_row(BENCH, "all rows", *shown)


def test_figures_of_the_root_are_those_of_the_committed_tables() -> None:
    """The same numbers as in the README of the benchmarks, fewer of them."""
    rows = read("bench_cpu.csv")
    ratios = {
        (row["provider"], row["mode"], row["x"]): f"{float(row['y']):.2f}"
        for row in rows
        if row["metric"] == "time_ratio"
    }
    shown = {
        "all rows": ("stats_all_rows", "forward"),
        "64 rows": ("stats_64_rows", "forward"),
        "`gap_adaptive`": ("gap_adaptive", "forward"),
        "`log` fp32": ("log", "forward"),
        "`log` bf16 backward": ("log_bf16", "forward+backward"),
    }
    for name, (provider, mode) in shown.items():
        assert has_row(README, name, *(ratios[provider, mode, length] for length in ("2048", "8192")))
    assert states(README, "`gap_adaptive`", f"{float(ratios['gap_adaptive', 'forward', '4096']):.1f}")
    rival = " | ".join(ratios["flex_attention", "forward", length] for length in ("2048", "4096")) + " |"
    assert has_row(BENCH, "FlexAttention", rival)
    monitor = [row for row in rows if row["kernel"] == "monitor" and row["metric"] == "time_ratio"]
    steps = {row["provider"]: float(row["y"]) for row in monitor}
    assert states(README, "monitored step", "50", f"{steps['every_50']:.3f}", f"{steps['every_1']:.2f}")
    for name, words in (("every_1", "every step"), ("every_10", "10th"), ("every_50", "50th")):
        assert has_row(BENCH, words, f"{steps[name]:.3f}")
    (added,) = (round(float(row["y"])) for row in rows if row["metric"] == "added_ms")
    assert states(BENCH, "`import attnscale`", str(added))


def answered(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of an evaluation for all models together, by policy and length."""
    rows = [row for row in read(name) if row["model"] == "all" and row["metric"] == "accuracy" and not row["bin"]]
    return {(row["policy"], row["length"]): row for row in rows}


TRAINED_WITH = ("log", "ssmax", "gap_adaptive")


def accuracy_by_criticality() -> tuple[list[tuple[list[str], str]], list[str]]:
    """Bins of criticality and the range of accuracies relative to argmax; number of points and rank correlation."""
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("results.csv", "swapped_in.csv"), ("statistics.csv", "swapped_in_statistics.csv")):
            shutil.copy(ASSETS / part, Path(folder, name))
        points, _ = critical_points(read_evaluation(Path(folder)), "multi_needle")
    bins = []
    for low, high in itertools.pairwise([0.0, 1.0, 1.3, 1.8, math.inf]):
        shares = [point.recall for point in points if low <= point.criticality < high]
        edges = [f"{edge:g}" for edge in (low, high) if 0 < edge < math.inf]
        bins.append((edges, f"{min(shares):.2f} to {max(shares):.2f}"))
    rho = rank_correlation([(point.criticality, point.recall) for point in points])
    return bins, [str(len(points)), f"{rho:.2f}"]


def test_figures_of_the_evaluation_are_those_of_the_committed_tables() -> None:
    found = answered("swapped_in.csv")
    shown = {policy: f"{100 * float(found[policy, '16384']['value']):.1f}" for policy, _ in found}
    ratio = [f"{float(found['log_squared', '16384'][f'ratio{end}']):.2f}" for end in ("", "_low", "_high")]
    assert states(README, "`log_squared`", shown["constant"], shown["log_squared"], shown["log"])
    assert states(LAB, "`log_squared`", shown["constant"], shown["log_squared"], *ratio)
    assert states(LAB, "`gap_adaptive`", shown["gap_adaptive"], shown["argmax"])
    assert LAB in RESULTS
    for text, policy in itertools.product(
        RESULTS, ("constant", "sqrt_log", "log", "log_squared", "gap_adaptive", "argmax")
    ):
        values = [found[policy, n]["value"] for n in ("128", "512", "2048", "8192", "16384")]
        assert has_row(text, f"`{policy}`", *(f"{100 * float(value):.1f}" for value in values))
    for text, name in itertools.product(RESULTS, TRAINED_WITH):
        trained = answered(f"trained_with_{name}.csv")
        for policy, label in (("own", f"`{name}`"), ("argmax", "argmax")):
            values = [f"{100 * float(trained[policy, n]['value']):.1f}" for n in ("128", "2048", "16384")]
            assert has_row(text, label, " | | ".join(values))
    bits = {
        row["policy"]: f"{float(row['difference']):.3f}"
        for row in read("swapped_in.csv")
        if (row["model"], row["metric"], row["length"], row["bin"]) == ("all", "bits_per_byte", "16384", "")
        and row["policy"] != "constant"
    }
    for text in (README, LAB):
        assert states(text, "`log_squared`", bits["log_squared"], bits["log"])
    own = [answered(f"trained_with_{name}.csv")["own", "16384"]["value"] for name in ("ssmax", "log")]
    assert states(README, "`ssmax`", *(f"{100 * float(value):.1f}" for value in own), shown["log"])
    bins, correlation = accuracy_by_criticality()
    for edges, shares in bins:
        assert has_row(LAB, " ".join(edges), shares)
    assert states(LAB, "Spearman", *correlation)
    growth, power, first, last = zip(*map(growth_of_scale, range(10, 15)), strict=True)
    for ends, digits in ((growth, 1), (power, 2), (first, 1), (last, 1)):
        assert states(LAB, "Λ, the β", f"{min(ends):.{digits}f}", f"{max(ends):.{digits}f}")


def growth_of_scale(seed: int) -> tuple[float, float, float, float]:
    """Λ of the head with the largest w_max at 128 tokens: its growth to 16384, the exponent of n, and the exponents of
    ln n between the first and the last two lengths. Raises if a power of ln n fits better."""
    where = {"task": "multi_needle", "policy": "constant", "model": f"constant-{seed}"}
    rows = [row for row in read("swapped_in_statistics.csv") if all(row[key] == value for key, value in where.items())]
    head = max((row for row in rows if row["length"] == "128"), key=lambda row: float(row["w_max"]))
    own = [row for row in rows if (row["layer"], row["head"]) == (head["layer"], head["head"])]
    points = sorted((int(row["length"]), float(row["accumulation_8"])) for row in own)
    y = [math.log(scale) for _, scale in points]
    residuals, exponents = [], []
    for x in ([math.log(n) for n, _ in points], [math.log(math.log(n)) for n, _ in points]):
        fitted = statistics.linear_regression(x, y)
        residuals.append(sum((b - fitted.intercept - fitted.slope * a) ** 2 for a, b in zip(x, y, strict=True)))
        exponents.append(fitted.slope)
    assert residuals[0] < residuals[1]
    ends = [(y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in (0, -2)]
    return math.exp(y[-1] - y[0]), exponents[0], *ends


def test_figures_of_calibration_are_those_of_the_committed_tables() -> None:
    recipes = {"decay": "weight decay", "no_decay": "no weight decay", "all": "all ten"}
    for row in read("calibration_errors.csv"):
        if row["recipe"] == "all":
            continue
        name = f"{row['quantity']} {recipes[row['recipe']]} {'n' if row['growth'] == '1' else '√n'}"
        forms = ("power", "log", "baseline")
        if row["quantity"] == "mildest law":
            assert has_row(CALIBRATION, name, *(f"{row[f'error_{form}']} of {row['seeds']}" for form in forms), "")
            continue
        cells = (f"{float(row[f'error_{form}']):.2f} ({float(row[f'worst_{form}']):.2f})" for form in forms)
        assert has_row(CALIBRATION, name, *cells, f"{row['in_bracket']} of {row['seeds']}" if row["in_bracket"] else "")
    for row in read("calibration_laws.csv"):
        numbers = [f"{100 * float(row['accuracy']):.1f}", f"{float(row['cost']):.4f}"]
        ratio = f"{float(row['cost_ratio']):.2f}" if row["policy"] != row["against"] else "1"
        line = rf"\| {recipes[row['recipe']]} \| `{row['policy']}` \| {numbers[0]} \| .* \| {numbers[1]} \| {ratio}\b"
        assert re.search(line, CALIBRATION), row
    for row in read("calibration_coverage.csv"):
        cells = (
            f"{float(row['exponent']):.2f}",
            f"{row['inside']} of {row['runs']}",
            f"{float(row['median_width']):.2f}",
        )
        assert re.search(rf"\| {row['law']} \| .* \| {' . '.join(map(re.escape, cells))} \|", CALIBRATION), row
        assert int(row["inside"]) >= 0.9 * int(row["runs"])


def test_the_bands_of_criticality_do_not_hold_for_every_model() -> None:
    edges = [(0.0, 1.0), (1.0, 1.3), (1.3, 1.8), (1.8, math.inf)]
    bands = dict(zip(edges, re.findall(r"\| (\d\.\d\d) to (\d\.\d\d) \|", LAB), strict=True))
    for recipe, words in (("decay", "the same recipe"), ("no_decay", "without weight decay")):
        rows = [row for row in read("calibration_criticality.csv") if (row["recipe"], row["growth"]) == (recipe, "1")]
        outside = 0
        for row in rows:
            r, share = float(row["criticality"]), round(float(row["share_of_argmax"]), 2)
            low, high = next(ends for (left, right), ends in bands.items() if left <= r < right)
            outside += not float(low) <= share <= float(high)
        assert states(LAB, words, str(outside), str(len(rows)))


def test_the_evidence_holds_what_the_first_picture_says() -> None:
    found = answered("swapped_in.csv")
    for policy in ("log_squared", "gap_adaptive"):
        assert float(found[policy, "16384"]["ratio_low"]) > 2
    best, adaptive = found["argmax", "16384"], found["gap_adaptive", "16384"]
    error = (float(best["high"]) - float(best["low"])) / 4
    assert abs(float(best["value"]) - float(adaptive["value"])) < 2 * error
    inside = [row for row in read("swapped_in.csv") if (row["metric"], row["length"]) == ("bits_per_byte", "128")]
    laws = [row for row in inside if row["policy"] in ("sqrt_log", "log", "log_squared")]
    assert laws
    assert all(float(row["difference"]) <= 0.01 for row in laws)


def test_figures_of_max_retrieval_are_those_of_the_committed_table() -> None:
    rows = read("max_retrieval.csv")
    for policy in ("constant", "entropy_adaptive", "log", "log_squared", "gap_adaptive", "argmax"):
        values = [100 * float(row["accuracy"]) for row in rows if (row["policy"], row["length"]) == (policy, "16384")]
        mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
        assert has_row(LAB, f"`{policy}`", f"{mean:.1f} ± {error:.1f}")


def test_figures_of_models_are_those_of_the_committed_tables() -> None:
    rows = {(row["provider"], row["mode"]): float(row["y"]) for row in read("bench_cpu.csv") if row["x"] == "4096"}
    for mode, text in (("prefill", "prefill"), ("decode", "decoding")):
        assert has_row(BENCH, text, f"{rows['log', mode]:.2f}")
        assert has_row(BENCH, f"{text} padded", f"{rows['log_padded', mode]:.2f}")
    bits = {(row["policy"], row["bin"]): row for row in read("smollm2.csv") if row["metric"] == "bits_per_byte"}
    bins = ("2048-4096", "4096-6144", "6144-8192", "8192-12288")
    for policy, text in (("constant", "β = 1"), ("log", "`log`")):
        assert has_row(HF, text, *(f"{float(bits[policy, part]['value']):.3f}" for part in bins))
    assert all(float(bits["log", part]["difference"]) == 0 for part in bins[:-1])
    ends = [float(bits["log", bins[-1]][f"difference{end}"]) for end in ("", "_low", "_high")]
    assert states(HF, "difference", *(f"{abs(end):.4f}" for end in ends))


def test_figures_of_the_calibrated_model_are_those_of_the_committed_tables() -> None:
    found = {
        (row["factor"], row["policy"], row["metric"]): row for row in read("calibrated_smollm2.csv") if not row["bin"]
    }
    scales = {"accuracy": (100, 1), "nats_per_answer_token": (1, 3), "bits_per_byte": (1, 4)}
    for factor, policy in dict.fromkeys((factor, policy) for factor, policy, _ in found):
        cells = []
        for metric, (scale, digits) in scales.items():
            row = found[factor, policy, metric]
            cells.append(f"{scale * float(row['value']):.{digits}f}")
            ends = [row[f"difference{end}"] for end in ("", "_low", "_high")]
            middle, low, high = (f"{scale * float(end):+.{digits}f}".replace("-", "−") if end else "" for end in ends)
            cells.append(f"{middle} ({low} to {high})" if middle else "")
        assert has_row(CALIBRATION, f"{factor}× `{policy}`", *cells)
    shown = [f"{-float(found['2', 'log', 'bits_per_byte']['difference']):.4f}"]
    shown += [f"{float(found['2', 'constant', 'bits_per_byte']['value']):.3f}"]
    shown += [f"{100 * float(found['2', policy, 'accuracy']['value']):.1f}" for policy in ("yarn:factor=2", "constant")]
    assert states(README, "SmolLM2-135M at 2 L", *shown)


def test_criticality_of_the_calibrated_model_is_that_of_the_committed_table() -> None:
    heads = [row for row in read("calibrated_smollm2_heads.csv") if row["factor"] == "2"]
    layers = [int(row["layer"].split(".")[2]) for row in heads]
    pairs = [(float(row["criticality_with_first"]), float(row["criticality"])) for row in heads]
    early = [pair for pair, layer in zip(pairs, layers, strict=True) if layer < 11]
    late = [pair for pair, layer in zip(pairs, layers, strict=True) if layer >= 11]
    near = sum(0.5 <= first <= 2 for first, _ in pairs)
    shown = [near, len(pairs), sum(first < 1 for first, _ in early), len(early)]
    assert states(CALIBRATION, "near r = 1", *map(str, shown))
    shown = [sum(first > 1 for first, _ in late), len(late), sum(rest > 1 for _, rest in late)]
    shown += [sum(rest < first * 2 / 3 for first, rest in late)]
    assert states(CALIBRATION, "near r = 1", *map(str, shown))
