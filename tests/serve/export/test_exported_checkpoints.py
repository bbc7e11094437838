"""Exports to vLLM and Ministral 3: the numbers of the source, a check before anything appears, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file

from attnscale import hf
from attnscale.cli import main
from attnscale.errors import ArgumentError, ExportError, MissingDependencyError
from attnscale.serve.export import export_model, llama_family, mistral, run, vllm

TOKENS = torch.randint(1, 257, (2, 100), generator=torch.Generator().manual_seed(1))
LOG = {"name": "log", "reference_length": 32}
STEPS = {"name": "mistral", "floor_length": 16, "coefficient": 0.5}
SSMAX = {"name": "ssmax", "reference_length": 32}
GQA_PLAN = {"default": LOG, "layers": {"1": LOG | {"reference_length": 64}}, "heads": {"0": {"name": "log"}}}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits_at_one(folder: Path) -> torch.Tensor:
    """The logits of a saved model at β = 1."""
    handle = hf.load(folder)
    handle.remove()
    return tiny_models.logits(handle.model, TOKENS)


@pytest.mark.parametrize("policy", [LOG, STEPS, SSMAX, GQA_PLAN, {"name": "yarn", "factor": 4}], ids=str)
def test_a_ministral_has_the_logits_of_the_source(saved: Any, tmp_path: Path, policy: Any) -> None:
    source = saved(policy)
    export = export_model(source, "mistral", tmp_path / "exported")
    served = transformers.AutoModelForCausalLM.from_pretrained(export.path)
    wanted = tiny_models.logits(hf.load(source).model, TOKENS)
    assert type(served).__name__ == "Ministral3ForCausalLM"
    assert not hasattr(served.config, "attnscale")
    torch.testing.assert_close(tiny_models.logits(served, TOKENS), wanted, rtol=0, atol=1e-4)
    assert float((logits_at_one(source) - wanted).abs().max()) > 0.1
    assert export.difference < 1e-4
    assert export.lengths == (512,)


@pytest.mark.parametrize(
    ("kind", "policy", "settings"),
    [
        (tiny_models.llama, LOG, {"tie_word_embeddings": True}),
        (tiny_models.mistral, SSMAX, {"sliding_window": 7}),
        (tiny_models.mistral, STEPS, {"sliding_window": 7}),
        (tiny_models.mistral, LOG, {"sliding_window": None}),
        (tiny_models.llama, LOG, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_models_of_the_llama_family_become_ministrals(
    saved: Any, tmp_path: Path, kind: Any, policy: Any, settings: Any
) -> None:
    source = saved(policy, kind, **settings)
    export = export_model(source, "mistral", tmp_path / "exported")
    served = transformers.AutoModelForCausalLM.from_pretrained(export.path)
    wanted = tiny_models.logits(hf.load(source).model, TOKENS)
    torch.testing.assert_close(tiny_models.logits(served, TOKENS), wanted, rtol=0, atol=1e-4)


def test_each_engine_finds_the_temperature_where_it_reads_it(saved: Any, tmp_path: Path) -> None:
    config = config_of(export_model(saved(STEPS), "mistral", tmp_path / "exported").path)
    assert config["rope_parameters"]["llama_4_scaling_beta"] == 0.5  # transformers and SGLang
    assert config["rope_parameters"]["original_max_position_embeddings"] == 16  # transformers
    assert config["llama_4_scaling"] == {"beta": 0.5, "original_max_position_embeddings": 16}  # vLLM
    assert config["original_max_position_embeddings"] == 16  # SGLang
    assert config["architectures"] == ["Ministral3ForCausalLM"]


def test_weights_in_bfloat16_keep_their_bits_under_one_law(saved: Any, tmp_path: Path) -> None:
    source = saved(LOG, dtype=torch.bfloat16)
    exported = export_model(source, "mistral", tmp_path / "exported").path
    before, after = load_file(source / "model.safetensors"), load_file(exported / "model.safetensors")
    assert set(before) == set(after)
    for name, weight in before.items():
        scale = 2.0**28 if "q_proj" in name else 1.0
        assert torch.equal(after[name] * scale, weight), name


def test_float16_is_refused_where_the_scaled_weights_underflow(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"float16 .* q_proj is multiplied by 3\.7e-09, which underflows"):
        export_model(saved(LOG, dtype=torch.float16), "mistral", tmp_path / "exported")


def test_float16_is_accepted_without_small_factors(saved: Any, tmp_path: Path) -> None:
    assert export_model(saved(STEPS, dtype=torch.float16), "mistral", tmp_path / "exported").path.is_dir()


@pytest.mark.parametrize("length", [16, 64])
def test_the_length_of_a_scaled_rotary_embedding_must_be_that_of_the_steps(
    saved: Any, tmp_path: Path, length: int
) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = saved(STEPS, rope_parameters=rope | {"original_max_position_embeddings": length})
    if length == 16:
        assert export_model(source, "mistral", tmp_path / "exported").difference < 1e-4
    else:
        with pytest.raises(ArgumentError, match=r"rope_type='llama3' .*=64 is not accepted .* the length 16 of the"):
            export_model(source, "mistral", tmp_path / "exported")


@pytest.mark.parametrize("to", ["mistral", "gguf"])
@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (tiny_models.ministral, {}, "model class MinistralForCausalLM is not accepted"),
        (tiny_models.llama, {"attention_bias": True}, "attention_bias=True in the config"),
        (tiny_models.llama, {"hidden_act": "gelu"}, "hidden_act='gelu' in the config"),
    ],
)
def test_other_models_are_refused(saved: Any, tmp_path: Path, to: str, kind: Any, settings: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{message}.*use --to vllm"):
        export_model(saved(STEPS, kind, **settings), to, tmp_path / "exported")


@pytest.mark.parametrize("to", ["mistral", "gguf"])
def test_a_policy_without_exact_form_is_never_written(saved: Any, tmp_path: Path, to: str) -> None:
    source = saved(LOG | {"floor": True})
    with pytest.raises(ArgumentError, match=f"is not accepted by --to {to}: .* misses its β by up to"):
        export_model(source, to, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [source]


def test_the_files_of_the_tokenizer_are_kept(saved: Any, tmp_path: Path) -> None:
    source = saved(LOG)
    for to in ("mistral", "vllm"):
        folder = export_model(source, to, tmp_path / to).path
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert tokenizer("abc")["input_ids"][0] == 256


@pytest.mark.parametrize("policy", [LOG | {"floor": True}, SSMAX | {"bias": True}], ids=str)
def test_an_export_to_vllm_is_the_same_model_under_another_name(saved: Any, tmp_path: Path, policy: Any) -> None:
    source = saved(policy)
    export = export_model(source, "vllm", tmp_path / "exported")
    before, after = config_of(source), config_of(export.path)
    assert after == before | {"architectures": ["AttnscaleLlamaForCausalLM"]}
    assert export.difference == 0.0
    wanted = tiny_models.logits(hf.load(source).model, TOKENS)
    assert torch.equal(tiny_models.logits(hf.load(export.path).model, TOKENS), wanted)


def test_from_pretrained_reads_an_export_to_vllm(saved: Any, tmp_path: Path) -> None:
    source = saved(LOG)
    export = export_model(source, "vllm", tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(export.path)
    assert torch.equal(tiny_models.logits(model, TOKENS), tiny_models.logits(hf.load(source).model, TOKENS))


def test_a_saved_copy_of_an_export_has_the_usual_name(saved: Any, tmp_path: Path) -> None:
    export = export_model(saved(LOG), "vllm", tmp_path / "exported")
    hf.load(export.path).model.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("policy", ["entropy_adaptive", "asentmax"])
def test_a_policy_that_reads_scores_or_queries_is_refused_for_vllm(saved: Any, tmp_path: Path, policy: str) -> None:
    source = saved({"name": policy})
    with pytest.raises(ArgumentError, match=r"model\.layers\.0\.self_attn has no table of β by length"):
        export_model(source, "vllm", tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [source]


def test_a_wrong_export_is_not_written(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(model: Any, form: Any) -> Any:
        return llama_family.folded_weights(model, form._replace(factors={}))

    monkeypatch.setattr(mistral, "folded_weights", unscaled)
    source = saved(SSMAX)
    with pytest.raises(ExportError, match=r"was not written: it differs from the source by"):
        export_model(source, "mistral", tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [source]


def test_another_temperature_in_the_written_config_is_noticed_at_any_length(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The comparison of texts is too short for steps of 16384 positions.
    real = llama_family.build_ministral
    monkeypatch.setattr(
        mistral, "build_ministral", lambda *given: real(*given[:2], given[2]._replace(coefficient=0.3), given[3])
    )
    source = saved({"name": "mistral"})
    with pytest.raises(ExportError, match=r"has the temperature \(0\.3, 16384\), not \(0\.1, 16384\)"):
        export_model(source, "mistral", tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_nothing_remains_of_an_interrupted_export(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write = vllm.write

    def fail(*given: Any) -> None:
        write(*given)
        raise error

    source = saved(LOG)
    monkeypatch.setattr(vllm, "write", fail)
    with pytest.raises(type(error)):
        export_model(source, "vllm", tmp_path / "deep" / "exported")
    assert list(tmp_path.iterdir()) == [source]


def test_an_existing_output_is_not_touched(saved: Any, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    output.mkdir()
    (output / "mine").write_text("kept")
    with pytest.raises(ArgumentError, match=r"output=.* is not accepted: expected a folder that does not exist yet"):
        export_model(saved(LOG), "mistral", output)
    assert [file.name for file in output.iterdir()] == ["mine"]


def test_wrong_arguments_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="to='tensorrt' is not accepted: expected vllm, mistral, gguf, onnx"):
        export_model(tmp_path / "missing", "tensorrt")
    with pytest.raises(ArgumentError, match=r"tokenizer='a.gguf' is not accepted: expected None except with to='gguf'"):
        export_model(tmp_path / "missing", "onnx", tokenizer="a.gguf")


def test_a_model_without_a_policy_is_refused(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ArgumentError, match="has no entry 'attnscale'"):
        export_model(tmp_path / "model", "mistral", tmp_path / "exported")


def test_an_adapter_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped:
        model = torch.nn.Linear(1, 1)

    monkeypatch.setattr(hf, "load", lambda path, **given: Wrapped())
    with pytest.raises(ArgumentError, match="it holds an adapter; merge it first"):
        export_model(tmp_path, "vllm", tmp_path / "exported")


def test_a_missing_package_is_named_with_its_install_command(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    monkeypatch.setitem(__import__("sys").modules, "onnx", __import__("json"))
    with pytest.raises(MissingDependencyError, match="attnscale export --to onnx needs onnxscript: pip install"):
        export_model(saved(LOG), "onnx", tmp_path / "exported")


@pytest.mark.parametrize("name", ["gap_adaptive", "entropy_adaptive"])
def test_a_graph_of_a_policy_that_reads_scores_is_refused(saved: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="reads the scores of its call"):
        export_model(saved({"name": name}), "onnx", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_traced_model_accepts_other_lengths_than_that_of_the_trace(saved: Any) -> None:
    handle = hf.load(saved(LOG | {"floor": True}))
    dynamic = {"tokens": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = handle.model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits

    program = torch.export.export(Logits(), (TOKENS[:, :40],), dynamic_shapes=dynamic).module(check_guards=False)
    wanted = tiny_models.logits(handle.model, TOKENS)
    torch.testing.assert_close(program(TOKENS).detach(), wanted, rtol=0, atol=1e-4)


def test_the_command_prints_the_largest_difference_and_the_folder(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(LOG)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "model", "--to", "vllm"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "largest difference from the source in log-probability: 0, at 512 tokens"
    assert second == f"wrote {tmp_path / 'model-vllm'}"
    assert main(["export", "model", "--to", "vllm"]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err


def test_the_limit_of_the_check_grows_only_with_the_rounding_of_the_source(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(SSMAX, dtype=torch.bfloat16)
    assert run._LIMIT < export_model(source, "mistral", tmp_path / "exported").difference < 1.0
    monkeypatch.setattr(run, "_ROUNDINGS", 0)
    with pytest.raises(ExportError, match="times the rounding of the source"):
        export_model(source, "mistral", tmp_path / "again")
