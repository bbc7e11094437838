"""Errors of `attnscale evaluate`: a one-line message, exit code 2, and no partial output."""

from __future__ import annotations

import resource
import shutil
from contextlib import contextmanager

import pytest
from small_evaluation import small
from transformers import GemmaConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config

from attnscale.cli import main
from attnscale.errors import ArgumentError
from attnscale.lab.evaluation import evaluate
from attnscale.lab.inputs import ModelFolder, read_law
from attnscale.policies import POLICIES
from scripts.training.embedded import save_byte_tokenizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ("lag",)}, r"policies='lag' is not accepted"),
        ({"policies": ("log", "log")}, r"different labels"),
        ({"lengths": (4,)}, r"lengths=4 is not accepted"),
        ({"tasks": ("niddle",)}, r"tasks='niddle' is not accepted: expected perplexity, multi_needle, needle, recall"),
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
    with pytest.raises(ArgumentError, match=r"model=.*\*\.safetensors"):
        evaluate(settings)
    (broken / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"model=.*config\.json"):
        evaluate(settings)
    assert not (tmp_path / "out").exists()


def test_a_table_of_positions_is_a_limit_and_a_rotary_embedding_is_not(text, tmp_path):
    path = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=32, n_layer=1, n_head=2)).save_pretrained(path)
    save_byte_tokenizer(path)
    with pytest.raises(ArgumentError, match=r"lengths=256 is not accepted: expected at most 128"):
        evaluate(small(path, text, tmp_path / "out"))


@contextmanager
def full_disk(most):
    """No file may become longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_the_next_run_goes_on(folder, text, tmp_path, capsys):
    settings = small(folder, text, tmp_path / "out", tasks=("multi_needle",))
    whole = evaluate(small(folder, text, tmp_path / "whole", tasks=("multi_needle",)))
    # A cell has the time that it took, in more or fewer digits.
    enough = 50 + max(path.stat().st_size for path in (whole / "cells").iterdir())
    assert enough < (whole / "results.csv").stat().st_size
    for room, cells in ((100, 0), (enough, 18)):
        with full_disk(room), pytest.raises(ArgumentError, match=r"output='.*out' cannot be written: File too large"):
            evaluate(settings)
        left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert len(left) == cells
        assert all(name.endswith(".json") and not name.startswith(".") for name in left)
    evaluate(settings)
    for name in ("results.csv", "statistics.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()
    with full_disk(100):
        assert main(["report", str(whole)]) == 2
    assert "report.html' cannot be written: File too large" in capsys.readouterr().err
    assert not list(whole.glob("**/*.part")) + list(whole.glob("*.html")) + list(whole.glob("*.png"))


def test_accidents_on_the_command_line_get_a_sentence_and_exit_code_two(folder, text, tmp_path, capsys):
    empty, bare, torn = tmp_path / "empty.txt", tmp_path / "bare", tmp_path / "torn"
    empty.write_bytes(b"")
    shutil.copytree(folder, bare)
    (bare / "model.safetensors").unlink()
    shutil.copytree(folder, torn)
    (torn / "model.safetensors").write_bytes(b"not a tensor")
    for words, message in (
        (["nowhere"], "model='nowhere' is not accepted"),
        ([str(bare)], "weights (*.safetensors)"),
        ([str(torn)], "torn' cannot be loaded: "),
        ([str(folder), str(torn)], "torn' cannot be loaded: "),
        ([str(folder), "--text", "nowhere.txt"], "text='nowhere.txt' is not accepted: expected an existing text file"),
        ([str(folder), "--text", str(empty)], "expected a text file that is not empty"),
        ([str(folder), "--lengths", "4096"], "text='6000 tokens' is not accepted: expected at least 8194"),
    ):
        given = ["--text", str(text), "--output", str(tmp_path / "out"), "--lengths", "64", "--windows", "2"]
        assert main(["evaluate", *given, "--tasks", "perplexity", *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("yarn", "policies='yarn' is not accepted: expected yarn with factor, such as yarn:factor=4"),
        ("far=longrope:factor=8", "expected longrope with original_length, such as longrope:original_length=4096"),
        ("per_head", "policies='per_head' is not accepted: expected a YAML file"),
        ("log:gama=1", "parameter 'gama' (value 1) is not accepted by policy 'log'"),
        ("yarn:factor=0", "factor=0 is not accepted: expected a number > 0"),
        ("log@warp:2", "rope='warp:2' is not accepted: expected yarn:4 or linear:4"),
        ("nowhere.yaml", "path='nowhere.yaml' is not accepted: expected an existing YAML file"),
    ],
)
def test_a_policy_that_cannot_be_built_is_refused_before_a_model_is_looked_at(policy, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", "nowhere", "--policies", f"constant,log,{policy}", "--output", "nowhere"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_that_cannot_be_built_is_refused_before_a_model_is_loaded(folder, text, tmp_path, monkeypatch):
    for name in ("load", "tokenizer"):
        monkeypatch.setattr(ModelFolder, name, lambda *_: pytest.fail("a model was loaded"))
    plan = tmp_path / "plan.yaml"
    plan.write_text("default: constant\nlayers:\n  0-1: yarn\n")
    with pytest.raises(ArgumentError, match="policy 'yarn' needs factor"):
        evaluate(small(folder, text, tmp_path / "out", policies=("constant", str(plan))))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "per_head"])
def test_the_example_in_a_refusal_is_accepted(name):
    try:
        read_law(name, 64)
    except ArgumentError as error:
        read_law(str(error).rpartition("such as ")[2], 64)


def test_what_is_said_of_a_missing_tokenizer_is_a_whole_sentence(folder, text, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ArgumentError, match=r"^tokenizer of model='.*bare' cannot be loaded: .*\.$"):
        evaluate(small(bare, text, tmp_path / "out"))


@pytest.mark.parametrize("config", [Qwen2Config, GemmaConfig], ids=["no_tokens", "unknown_tokens"])
@pytest.mark.parametrize("task", ["perplexity", "recall"])
def test_a_folder_without_tokenizer_files_is_named_as_the_cause(config, task, folder, text, tmp_path):
    bare = tmp_path / "bare"
    config(vocab_size=256, hidden_size=32, num_hidden_layers=1).save_pretrained(bare)  # gives an empty tokenizer
    shutil.copy(folder / "model.safetensors", bare)
    with pytest.raises(ArgumentError, match=r"^model='.*bare' is not accepted: .*tokenizer\.json"):
        evaluate(small(bare, text, tmp_path / "out", tasks=(task,)))


def test_a_mistake_in_the_last_policy_or_length_shows_before_anything_is_computed(folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr("attnscale.lab.tasks.stream", lambda *_: pytest.fail("a cell was computed"))
    with pytest.raises(ArgumentError, match=r"'gama'"):
        evaluate(small(folder, text, tmp_path / "out", policies=("constant", "log:gama=1")))
    with pytest.raises(ArgumentError, match=r"expected at least \d+ tokens of text for a length of 8192"):
        evaluate(small(folder, text, tmp_path / "out", lengths=(64, 8192), tasks=("needle",)))
    assert not (tmp_path / "out").exists()
