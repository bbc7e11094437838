"""`attnscale evaluate`: the right numbers, on the same samples for all policies, and resumable after a kill."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import attnscale.hf
from attnscale.bench.memory import peak_bytes
from attnscale.errors import ArgumentError
from attnscale.lab.byte_tokenizer import save_byte_tokenizer
from attnscale.lab.evaluation import Evaluation, evaluate
from attnscale.lab.needles import BYTES
from attnscale.lab.streaming import stream
from attnscale.lab.tasks import windows_of
from attnscale.lab.training import build_model, read_text

STYLE = {name: getattr(BYTES, name) for name in ("needle", "question", "answer", "alphabet")}
STYLE |= {"key_symbols": 2, "value_symbols": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_model(64, seed=3).save_pretrained(path)
    save_byte_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(read_text("held_out")[:6000].tolist()))
    return path


def small(folder: Path, prose: Path, output: Path, **changes) -> Evaluation:
    arguments = {"policies": ("constant", "log", "gap_adaptive:r=4"), "lengths": (64, 256), "windows": 3, "samples": 3}
    arguments |= {"needles_every": 16, "asked": 4, "chunk": 100, "text": str(prose), **STYLE}
    return Evaluation(models=(str(folder),), output=str(output), **(arguments | changes))


def rows(output: Path, name: str = "results.csv", **wanted) -> list[dict[str, str]]:
    with (output / name).open() as file:
        return [row for row in csv.DictReader(file) if all(row[key] == str(value) for key, value in wanted.items())]


@torch.no_grad()
def test_bits_per_byte_are_those_of_one_plain_forward(folder, text, tmp_path):
    output = evaluate(small(folder, text, tmp_path / "out", tasks=("perplexity",)))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor(list(text.read_bytes()))
    for policy, spec in {"constant": "constant", "log": {"name": "log", "reference_length": 64, "floor": True}}.items():
        bits = []
        with attnscale.hf.apply(model, spec, layers="full"):
            for window in windows_of(tokens, 256, 3):
                logits = model(window[None, :-1]).logits[0].double()
                losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
                bits.append(losses[128:].mean().item() / math.log(2))
        (row,) = rows(output, task="perplexity", metric="bits_per_byte", policy=policy, length=256, bin="")
        assert float(row["value"]) == pytest.approx(sum(bits) / 3, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("policy", [{"name": "log", "reference_length": 64}, "gap_adaptive"], ids=["log", "gaps"])
def test_a_streamed_forward_has_the_logits_of_a_whole_one(folder, policy):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = read_text("held_out")[:200]
    with attnscale.hf.apply(model, policy, layers="full"):
        whole = model(tokens[None]).logits[0]
        parts = torch.cat([logits for _, logits in stream(model, tokens, 64)])
        some = tokens == 32
        chosen = torch.cat([logits for _, logits in stream(model, tokens, 64, some)])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chosen, whole[some], rtol=1e-4, atol=1e-4)


def test_memory_grows_with_the_length_and_not_with_its_square(folder):
    model, text = AutoModelForCausalLM.from_pretrained(folder).eval(), read_text("train")
    with torch.inference_mode(), attnscale.hf.apply(model, "log", reference_length=64, layers="full"):
        short, long = (
            peak_bytes(lambda n=n: [logits.sum() for _, logits in stream(model, text[:n], 256)]) for n in (2048, 8192)
        )
    assert long < 4.5 * short
    assert long < 8192 * 8192 / 2  # bytes: not even a bool of each pair


def test_policies_are_compared_on_the_same_samples(folder, text, tmp_path):
    output = evaluate(small(folder, text, tmp_path / "out", policies=("constant", "log", "again=constant:beta=1.0")))
    for task, length in (("perplexity", 256), ("multi_needle", 256)):
        (same,) = rows(output, task=task, policy="again", length=length, bin="", metric=_metric(task))
        assert float(same["difference"]) == float(same["difference_low"]) == float(same["difference_high"]) == 0.0
    (inside,) = rows(output, task="perplexity", policy="log", length=64, bin="", metric="bits_per_byte")
    assert float(inside["difference"]) == 0.0  # anchored with a floor: nothing changes up to the trained length


def _metric(task: str) -> str:
    return "bits_per_byte" if task == "perplexity" else "accuracy"


def test_statistics_are_those_of_the_rows_that_answer(folder, text, tmp_path):
    output = evaluate(small(folder, text, tmp_path / "out", tasks=("multi_needle",)))
    found = rows(output, "statistics.csv", policy="gap_adaptive:r=4", length=256)
    assert {(row["layer"], row["head"]) for row in found} == {
        ("model.layers.1.self_attn", "0"),
        ("model.layers.1.self_attn", "1"),
    }
    for row in found:
        # r = 4 on Λ from the second rank on, which is never below Λ from the eighth on.
        assert float(row["beta"]) == pytest.approx(4 * float(row["accumulation_2"]), rel=0.15)
        assert float(row["criticality"]) >= 4 * 0.99
        assert float(row["accumulation_16"]) <= float(row["accumulation_8"]) <= float(row["accumulation_2"])
        assert 240 <= float(row["visible"]) <= 256
        assert 0.9 < float(row["w_max"]) <= 1.0  # r = 4 guarantees 1/ζ(4) = 0.92
    (plain, _) = rows(output, "statistics.csv", policy="constant", length=256)
    assert float(plain["beta"]) == 1.0
    assert float(plain["entropy"]) > 1.0


def test_results_are_also_in_the_conventions_of_lm_eval(folder, text, tmp_path):
    output = evaluate(small(folder, text, tmp_path / "out"))
    content = json.loads((output / "lm_eval" / "results_log.json").read_text())
    (accuracy,) = rows(output, task="multi_needle", policy="log", length=256, bin="")
    (bits,) = rows(output, task="perplexity", metric="bits_per_byte", policy="log", length=256, bin="")
    found = content["results"]
    assert found["multi_needle_256"]["acc,none"] == pytest.approx(float(accuracy["value"]), rel=1e-5)
    spread = float(bits["high"]) - float(bits["low"])
    assert found["perplexity_256"]["bits_per_byte_stderr,none"] == pytest.approx(spread / 3.92, rel=1e-3)
    assert content["n-samples"]["multi_needle_256"]["effective"] == 3
    assert (output / "lm_eval" / "results_gap_adaptive_r=4.json").is_file()


def test_recall_takes_the_arguments_people_know(folder, text, tmp_path):
    output = evaluate(small(folder, text, tmp_path / "out", tasks=("recall",), num_kv_pairs=8))
    (row,) = rows(output, task="recall", policy="constant", length=256, bin="")
    assert row["samples"] == "3"
    with pytest.raises(ArgumentError, match=r"num_kv_pairs=17 is not accepted.*input_seq_len=64"):
        evaluate(small(folder, text, tmp_path / "other", tasks=("recall",), num_kv_pairs=17))


def test_finished_cells_are_not_computed_again(folder, text, tmp_path, monkeypatch):
    settings = small(folder, text, tmp_path / "out", tasks=("multi_needle",))
    output = evaluate(settings)
    first = (output / "results.csv").read_bytes()
    monkeypatch.setattr("attnscale.lab.evaluation._compute", lambda *_: pytest.fail("a finished cell was computed"))
    evaluate(settings)
    assert (output / "results.csv").read_bytes() == first


KILLED = """
import json, os, signal, sys
from attnscale.lab.cells import Cells
from attnscale.lab import evaluation
write = Cells.write
count = 0
def killing(self, key, **content):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, key, **content)
if sys.argv[2] == "kill":
    Cells.write = killing
given = json.loads(sys.argv[1]).items()
evaluation.evaluate(evaluation.Evaluation(**{k: tuple(v) if isinstance(v, list) else v for k, v in given}))
"""


def test_a_killed_run_goes_on_and_gives_the_same_tables(folder, text, tmp_path):
    whole = evaluate(small(folder, text, tmp_path / "whole"))
    broken = small(folder, text, tmp_path / "broken")
    command = [sys.executable, "-c", KILLED, json.dumps(dataclasses.asdict(broken))]
    killed = subprocess.run([*command, "kill"], capture_output=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert len(list((tmp_path / "broken" / "cells").glob("*.json"))) == 4
    assert not (tmp_path / "broken" / "results.csv").exists()
    evaluate(broken)
    for name in ("results.csv", "statistics.csv"):
        assert (tmp_path / "broken" / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_says_what_it_was(folder, text, tmp_path):
    output = evaluate(small(folder, text, tmp_path / "out", tasks=("multi_needle",)))
    run = json.loads((output / "run.json").read_text())
    assert run["policies"]["log"] == {"name": "log", "reference_length": 64, "floor": True}
    assert run["models"]["tiny"]["trained_length"] == 64
    assert run["command"].startswith("attnscale evaluate ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ("lag",)}, r"policies='lag' is not accepted"),
        ({"policies": ("log", "log")}, r"different labels"),
        ({"lengths": (4,)}, r"lengths=4 is not accepted"),
        ({"tasks": ("niddle",)}, r"tasks='niddle' is not accepted: expected perplexity, needle"),
        ({"text": "missing.txt"}, r"text='missing.txt' is not accepted: expected an existing text file"),
        ({"lengths": (64, 4096)}, r"text='6000 tokens' is not accepted: expected at least 12291"),
        ({"rope": "yarn"}, r"rope='yarn' is not accepted"),
        ({"needle": "no holes"}, r"needle='no holes' is not accepted"),
        ({"samples": 0}, r"samples=0 is not accepted"),
        ({"needles_every": 4, "lengths": (256,), "asked": 64}, r"length=256 is not accepted: expected at least"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_leaves_nothing(folder, text, tmp_path, changes, message):
    with pytest.raises(ArgumentError, match=message):
        evaluate(small(folder, text, tmp_path / "out", **changes))
    assert not (tmp_path / "out" / "results.csv").exists()
    assert not list((tmp_path / "out").glob("**/*.part"))


def test_folders_that_are_no_models_are_refused(folder, text, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    settings = small(broken, text, tmp_path / "out")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ArgumentError, match=r"model='.*broken' cannot be loaded"):
        evaluate(settings)
    weights.unlink()
    with pytest.raises(ArgumentError, match=r"expected a folder with weights"):
        evaluate(settings)
    (broken / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"expected a folder with the config.json"):
        evaluate(settings)
    assert not (tmp_path / "out").exists()


def test_a_table_of_positions_is_a_limit_and_a_rotary_embedding_is_not(text, tmp_path):
    path = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=32, n_layer=1, n_head=2)).save_pretrained(path)
    save_byte_tokenizer(path)
    with pytest.raises(ArgumentError, match=r"lengths=256 is not accepted: expected at most 128"):
        evaluate(small(path, text, tmp_path / "out"))


def test_a_full_disk_is_said(folder, text, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnscale.lab.cells.write_whole", full)
    with pytest.raises(ArgumentError, match=r"output='.*out' cannot be written: No space left on device"):
        evaluate(small(folder, text, tmp_path / "out"))
