"""The model in the wheel: small, loadable with transformers alone, trained by code in the repository."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnscale.lab.evaluation import demo_evaluation, evaluate
from attnscale.lab.inputs import ModelFolder
from attnscale.lab.results import RESULT_COLUMNS
from scripts.training.embedded import Training, train

FOLDER = ModelFolder.at("embedded", "float32").path


def test_it_is_a_folder_of_at_most_two_megabytes_for_plain_transformers():
    files = [path for path in FOLDER.iterdir() if path.suffix in (".json", ".safetensors")]
    assert sum(path.stat().st_size for path in files) <= 2_000_000
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert model.config.max_position_embeddings == 128
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer("\x01K3é").input_ids == list("\x01K3é".encode())


def test_the_demonstration_shows_that_constant_beta_fades_and_a_law_holds(tmp_path):
    settings = demo_evaluation(tmp_path / "demo", quick=True)
    output = evaluate(settings)
    lines = [line.split(",") for line in (output / "results.csv").read_text().splitlines()[1:]]
    found = [dict(zip(RESULT_COLUMNS, line, strict=True)) for line in lines]
    accuracy = {
        (row["policy"], int(row["length"])): float(row["value"])
        for row in found
        if row["metric"] == "accuracy" and not row["bin"]
    }
    assert accuracy["constant", 128] >= 0.85
    assert accuracy["constant", 2048] < accuracy["constant", 128]
    assert accuracy["log_squared", 2048] > accuracy["constant", 2048]
    inside = [row for row in found if row["metric"] == "bits_per_byte" and row["length"] == "128" and not row["bin"]]
    assert all(float(row["difference"]) == 0 for row in inside if row["policy"] in ("sqrt_log", "log", "log_squared"))


def test_training_is_reproducible_and_learns():
    settings = Training("unused", steps=12, length=64, batch=4)
    first, again, other = train(settings, "constant", 0), train(settings, "constant", 0), train(settings, "constant", 1)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    longer = train(Training("unused", steps=60, length=64, batch=4), "constant", 0)
    tokens = torch.tensor(list(b"Of Man's first disobedience, and the fruit of that forbidden tree"))[None]
    with torch.no_grad():
        losses = [model(tokens, labels=tokens).loss.item() for model in (first, longer)]
    assert losses[1] < losses[0]
