"""lm-evaluation-harness, offline: attnscale tasks, RULER tasks, and the effect of a policy on the scores."""

from __future__ import annotations

import itertools
import json
import re
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")

import lm_eval
import nltk
import transformers
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_models import byte_tokenizer, llama

import attnscale.hf
from attnscale.errors import ArgumentError
from attnscale.lab.lm_eval_tasks import FOLDER, task, task_manager

TASKS = ("attnscale_needle", "attnscale_multi_needle", "attnscale_recall")
WRITERS = {"needle": task.needle, "multi_needle": task.multi_needle, "recall": task.recall}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No host has an address, and lm-eval does not ask git, pip and nvidia-smi about the machine, which takes long."""

    def refuse(host, *_, **__):
        raise socket.gaierror(f"{host} was asked for offline")

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    # RULER downloads punkt_tab unless there is a folder of that name; only its essays are read with it.
    (tmp_path / "tokenizers" / "punkt_tab").mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a byte, loaded from a folder as users do."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def harness(tokenizer, policy="log", max_length=1024, **settings):
    """A model with a policy in fp64, as lm-eval takes it."""
    model = llama(vocab_size=256, max_position_embeddings=max_length)
    attnscale.hf.apply(model, policy, **settings)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=2, device="cpu")


def evaluate(lm, *tasks, **metadata):
    metadata = {"max_seq_lengths": [384, 512], "num_samples": 2} | metadata
    return lm_eval.simple_evaluate(lm, tasks=list(tasks), task_manager=task_manager(lm, **metadata), bootstrap_iters=0)


def loglikelihood(model, tokenizer, prompt, answer):
    """Of an answer after a prompt, by one forward."""
    tokens = torch.tensor(tokenizer(prompt + answer).input_ids)
    scores = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    size = len(tokenizer(answer).input_ids)
    return scores[-size:].gather(1, tokens[-size:, None]).sum().item()


class Reader(LM):
    """Knows every answer in prompts of at most `longest` characters."""

    max_length = 1024

    def __init__(self, tokenizer, longest):
        super().__init__()
        self.tokenizer, self.longest, self.config = tokenizer, longest, None

    def loglikelihood(self, requests):
        return [(-1.0, self.answer(*request.args)) for request in requests]

    def answer(self, prompt, answer):
        facts = dict(re.findall(r"(?:number of )?(\w+)(?: is|:) (\d{5})", prompt))
        words = re.search(r"(?:is|are) the (?:special )?numbers? of (.*)\?", prompt)[1].split(", ")
        return len(prompt) <= self.longest and answer == " " + ", ".join(facts[word] for word in words)

    loglikelihood_rolling = generate_until = None


Reader.__abstractmethods__ = frozenset()


@torch.no_grad()
def test_scores_are_those_of_a_forward_of_the_model_with_its_policy(tokenizer):
    lm = harness(tokenizer, reference_length=64)
    assert lm.config.attnscale["modules"]  # the policy is in the model that lm-eval holds
    stock = llama(vocab_size=256, max_position_embeddings=1024)
    for sample in itertools.chain(*evaluate(lm, *TASKS)["samples"].values()):
        prompt, answer = sample["arguments"][0]
        ((score, greedy),) = sample["filtered_resps"]
        assert score == pytest.approx(loglikelihood(lm.model, tokenizer, prompt, answer), abs=1e-9)
        assert abs(score - loglikelihood(stock, tokenizer, prompt, answer)) > 0.1
        assert sample["acc"] == greedy == 0


def test_a_constant_policy_scores_as_the_stock_model(tokenizer):
    stock = HFLM(llama(vocab_size=256, max_position_embeddings=1024), tokenizer=tokenizer, max_length=1024)
    score = {
        name: evaluate(lm, "attnscale_needle")["results"]["attnscale_needle"]["loglikelihood,none"]
        for name, lm in {"stock": stock, "constant": harness(tokenizer, "constant")}.items()
    }
    assert score["constant"] == pytest.approx(score["stock"], abs=1e-9)


@pytest.mark.parametrize(("longest", "score"), [(1024, (1.0, 1.0, 1.0)), (400, (0.5, 1.0, 0.0)), (0, (0.0, 0.0, 0.0))])
def test_accuracy_counts_whole_answers_overall_and_by_length(longest, score, tokenizer):
    results = evaluate(Reader(tokenizer, longest), "attnscale")["results"]
    assert set(results) == set(TASKS)
    for result in results.values():
        assert (result["acc,none"], result["384,none"], result["512,none"]) == score
        assert result["loglikelihood,none"] == -1.0


def test_the_json_of_results_has_the_conventional_keys_and_the_policy(tokenizer, tmp_path):
    lm = harness(tokenizer, reference_length=64)
    tracker = EvaluationTracker(output_path=str(tmp_path / "run"))
    results = evaluate(lm, "attnscale_recall")
    tracker.save_results_aggregated(results=results, samples=results.pop("samples"))
    (file,) = (tmp_path / "run").rglob("results_*.json")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config", "date"} <= set(saved)
    metrics = {f"{name}{kind},none" for name in ("acc", "loglikelihood", "384", "512") for kind in ("", "_stderr")}
    assert metrics <= set(saved["results"]["attnscale_recall"])
    assert saved["n-samples"]["attnscale_recall"] == {"original": 4, "effective": 4}
    assert saved["max_length"] == 1024
    (policy,) = saved["configs"]["attnscale_recall"]["metadata"]["attnscale"]["modules"].values()
    assert (policy["name"], policy["reference_length"]) == ("log", 64)


def test_niah_single_1_of_ruler_runs_offline_with_a_policy(tokenizer, monkeypatch):
    # When imported, RULER pairs all adjectives with all nouns, which takes 12 s and 1.3 GB: here are fewer of them.
    few = {"nouns": ["harbour", "letter"], "adjectives": ["late", "quiet"], "verbs": ["sweep"]}
    monkeypatch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=few))
    lm = harness(tokenizer, reference_length=64)
    # The folder of RULER alone: indexing all of lm-eval's tasks takes up to a minute.
    ruler = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    metadata = {"tokenizer": tokenizer.name_or_path, "max_seq_lengths": [1024]}
    tasks = TaskManager(include_path=str(ruler), include_defaults=False, metadata=metadata)
    results = lm_eval.simple_evaluate(
        lm, tasks=["niah_single_1"], task_manager=tasks, limit=1, bootstrap_iters=0, gen_kwargs={"max_gen_toks": 8}
    )
    assert results["results"]["niah_single_1"]["1024,none"] == 0.0
    (sample,) = results["samples"]["niah_single_1"]
    prompt, ((answer,),) = sample["arguments"][0][0], sample["resps"]
    assert "The grass is green." in prompt
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    made = lm.model.generate(tokens, max_new_tokens=8, do_sample=False)[0, tokens.shape[1] :]
    assert answer == tokenizer.decode(made, skip_special_tokens=True)


def test_lengths_beyond_the_model_are_refused(tokenizer):
    lm = harness(tokenizer, max_length=448)
    with pytest.raises(ArgumentError, match=r"max_seq_lengths=\[384, 512\].*max_length=448"):
        evaluate(lm, "attnscale_needle")


@pytest.mark.parametrize(("extra", "refused"), [(0, False), (600, True)])
def test_a_prompt_that_outgrows_the_model_is_refused_and_not_cut(extra, refused, tokenizer):
    lm = Reader(tokenizer, 0)
    tasks = task_manager(lm, [512], num_samples=1)
    arguments = {"tasks": ["attnscale_needle"], "task_manager": tasks, "system_instruction": "x" * extra}
    if refused:
        with pytest.raises(ArgumentError, match=r"max_length=1024 .* at least 1\d\d\d, the longest prompt"):
            lm_eval.simple_evaluate(lm, **arguments)
    else:
        assert lm_eval.simple_evaluate(lm, **arguments)["n-samples"]["attnscale_needle"]["effective"] == 1


def test_without_the_helper_the_length_of_the_model_must_be_said(tokenizer):
    metadata = {"tokenizer": tokenizer.name_or_path, "max_seq_lengths": [512], "num_samples": 1}
    with pytest.raises(ArgumentError, match="max_length=None"):
        TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata).load(["attnscale_needle"])
    loaded = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata | {"max_length": 512})
    assert len(loaded.load(["attnscale_needle"])["tasks"]["attnscale_needle"].eval_docs) == 1


def test_a_cache_of_requests_that_does_not_know_lengths_is_refused(tokenizer):
    lm = Reader(tokenizer, 0)
    with pytest.raises(ArgumentError, match="cache_requests=True"):
        lm_eval.simple_evaluate(
            lm, tasks=["attnscale_needle"], task_manager=task_manager(lm, [512], num_samples=1), cache_requests=True
        )


def write(tokenizer, kind, **metadata):
    return WRITERS[kind](tokenizer=tokenizer.name_or_path, max_length=4096, **metadata)["test"]


@pytest.mark.parametrize("kind", WRITERS)
def test_documents_fill_their_length_and_hold_their_answer(kind, tokenizer):
    written = write(tokenizer, kind, max_seq_lengths=[512, 2048], num_samples=3)
    longest = 20 if kind == "recall" else 90  # characters of a unit of the haystack
    assert written["max_length"] == [512, 2048] * 3  # so that a limit takes as many of each length
    for document in written:
        whole = f"{document['context']} {document['prefix']}{document['target']}"
        assert document["length"] == len(tokenizer(whole).input_ids)
        assert document["max_length"] - longest <= document["length"] <= document["max_length"]
        assert all(number in document["context"] for number in document["target"].strip().split(", "))


def test_the_needle_lies_at_the_depth_that_the_document_says(tokenizer):
    for document in write(tokenizer, "needle", max_seq_lengths=[4096], num_samples=4):
        place = document["context"].index("The special number of") / len(document["context"])
        assert place == pytest.approx(document["depth"], abs=0.06)


def test_a_seed_fixes_the_documents_and_another_changes_all(tokenizer):
    first, again, other = (
        write(tokenizer, "recall", max_seq_lengths=[512], num_samples=2, seed=seed)["target"] for seed in (1, 1, 2)
    )
    assert first == again
    assert not set(first) & set(other)


def test_the_haystack_may_be_a_file(tokenizer, tmp_path):
    (tmp_path / "book.txt").write_text("Call me\nIshmael. It is\na way I have! Why?", encoding="utf-8")
    (document,) = write(tokenizer, "needle", max_seq_lengths=[512], num_samples=1, haystack=str(tmp_path / "book.txt"))
    assert re.search(r"Call me Ishmael. (The special .*?\d\. )?It is a way I have! ", document["context"])
    assert "harbour" not in document["context"]


@pytest.mark.parametrize(
    "metadata", [{"max_seq_lengths": 512}, {"max_seq_lengths": [64]}, {"num_samples": 0}, {"tokenizer": None}], ids=str
)
def test_metadata_that_cannot_be_used_is_refused_by_name(metadata, tokenizer):
    with pytest.raises(ArgumentError, match=next(iter(metadata))):
        task.needle(**{"tokenizer": tokenizer.name_or_path, "max_length": 4096} | metadata)


def test_every_task_is_in_the_package_and_documented():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(TASKS)
    assert all(f"`{task}`" in page for task in TASKS)
    assert find_spec("attnscale.lab.lm_eval_tasks.task")
