"""`attnscale evaluate`: correct numbers, the same samples for all policies, and resuming after a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys

import pytest
import torch
from small_evaluation import rows, small
from transformers import AutoModelForCausalLM

import attnscale.hf
from attnscale.errors import ArgumentError
from attnscale.lab.evaluation import evaluate
from attnscale.lab.inputs import ModelFolder
from attnscale.lab.sequences import windows_of
from attnscale.lab.tasks import stream
from attnscale.statistics.gaps import BRACKET_WIDTH
from scripts.cost.measuring import peak_bytes
from scripts.training.embedded import read_text


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
        assert 1.0 <= float(row["beta"]) / (4 * float(row["accumulation_2"])) <= 1 + BRACKET_WIDTH
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
    monkeypatch.setattr("attnscale.lab.tasks.stream", lambda *_: pytest.fail("a finished cell was computed"))
    evaluate(settings)
    assert (output / "results.csv").read_bytes() == first


KILLED = """
import json, os, signal, sys
from attnscale.lab.results import Cells
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


def test_short_sequences_come_first_and_the_model_is_loaded_once(folder, text, tmp_path, monkeypatch):
    loads, seen = [], []
    load = ModelFolder.load
    monkeypatch.setattr(ModelFolder, "load", lambda self, *given: loads.append(given) or load(self, *given))
    settings = small(folder, text, tmp_path / "out", policies=("constant", "log"), lengths=(256, 64, 128))
    evaluate(settings, lambda done, total, label: seen.append((done, total, label)))
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    lengths = [int(re.search(r", (\d+) tokens", label)[1]) for _, _, label in seen[:-1]]
    assert lengths == sorted(lengths)
    assert set(lengths) == {64, 128, 256}
    assert len(loads) == 1
    assert "left" not in seen[0][2]
    assert "at least" in seen[1][2]
    assert re.search(r"about \d+ s left", seen[-2][2])


def test_the_order_of_computation_does_not_show_in_the_tables(folder, text, tmp_path):
    whole = evaluate(small(folder, text, tmp_path / "whole", lengths=(256, 64)))
    evaluate(small(folder, text, tmp_path / "parts", lengths=(256, 64), policies=("log",), tasks=("multi_needle",)))
    parts = evaluate(small(folder, text, tmp_path / "parts", lengths=(256, 64)))
    for name in ("results.csv", "statistics.csv"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
