"""The vLLM plugin, with a stand-in for vLLM: where β goes, and what is refused."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_stub as stub
from torch import Tensor, nn

from attnscale import build_policy
from attnscale.errors import ArgumentError, BackendError
from attnscale.serve import vllm_plugin
from attnscale.serve.tables import beta_table

PATHS = "model.layers.0-1.self_attn"
LOG = {"name": "log", "reference_length": 32, "floor": True}
SSMAX = {"name": "ssmax", "bias": True, "reference_length": 32}


def record_of(entry: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"modules": {PATHS: dict(entry)}} | more


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stub.install(monkeypatch)


def resolve(config: Any) -> type[nn.Module]:
    """Return the model class that vLLM gets for a config."""
    vllm_plugin.register()
    from vllm.model_executor.models.registry import _ModelRegistry

    return _ModelRegistry().resolve_model_cls(["LlamaForCausalLM"], config)[0]


def make(
    entry: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None, config: Any = None, **parallel: int
) -> Any:
    """Make and load a model as vLLM does."""
    config = config or stub.model_config(record_of(entry))
    model: Any = resolve(config)(vllm_config=stub.vllm_config(config, **parallel))
    model.load_weights(iter((weights or {}).items()))
    model.process_weights_after_loading()
    return model


def learned(heads: int = stub.HEADS) -> dict[str, Tensor]:
    names = [f"model.layers.{layer}.self_attn.attnscale.policy.{name}" for layer in range(2) for name in "sb"]
    return {name: torch.randn(heads) for name in names}


@pytest.fixture
def made() -> Iterator[Any]:
    """The attention modules of the model, for a test to replace."""
    before = stub.LlamaForCausalLM.made
    yield lambda build: setattr(stub.LlamaForCausalLM, "made", staticmethod(build))
    stub.LlamaForCausalLM.made = staticmethod(before)


@pytest.mark.parametrize("shape", [(5, stub.HEADS * stub.DIM), (5, stub.HEADS, stub.DIM)])
def test_queries_are_multiplied_by_beta_at_their_positions(shape: tuple[int, ...]) -> None:
    positions, queries = torch.tensor([0, 31, 32, 200, 7]), torch.randn(shape)
    beta = beta_table(build_policy(LOG), stub.LENGTH)[positions]
    for found in make(LOG)(positions, queries):
        expected = queries.reshape(5, stub.HEADS, stub.DIM) * beta[:, None]
        torch.testing.assert_close(found, expected.reshape(shape), rtol=0, atol=0)


def test_beta_is_applied_in_fp32_and_rounded_once() -> None:
    queries = torch.randn(3, stub.HEADS * stub.DIM).bfloat16()
    beta = beta_table(build_policy(LOG), stub.LENGTH)[[100, 150, 255]]
    found = make(LOG, config=stub.model_config(record_of(LOG), dtype=torch.bfloat16))
    assert found(torch.tensor([100, 150, 255]), queries)[0].equal((queries.float() * beta).bfloat16())


def test_the_window_of_a_layer_bounds_n(made: Any) -> None:
    made(lambda: stub.LlamaAttention(stub.Attention(sliding_window=48)))
    found = make(LOG)(torch.tensor([200]), torch.ones(1, stub.HEADS * stub.DIM))[0]
    assert found.unique().equal(build_policy(LOG)(48).reshape(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_tensor_parallelism_gets_the_columns_of_its_heads(
    rank: int, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    stub.install(monkeypatch, rank=rank, ranks=2)
    made(lambda: stub.LlamaAttention(stub.Attention(num_heads=stub.HEADS // 2)))
    weights = learned()
    found = make(SSMAX, weights)(torch.tensor([99]), torch.ones(1, stub.HEADS // 2, stub.DIM))
    for layer, scaled in enumerate(found):
        s, b = (weights[f"model.layers.{layer}.self_attn.attnscale.policy.{name}"] for name in "sb")
        expected = (s * torch.tensor(100.0).log() + b).chunk(2)[rank]
        torch.testing.assert_close(scaled[0, :, 0], expected)


def test_the_tensors_of_policies_are_kept_from_the_loader_of_the_model() -> None:
    config = stub.model_config(record_of(SSMAX))
    model: Any = resolve(config)(vllm_config=stub.vllm_config(config))
    assert model.load_weights(iter({"model.norm.weight": torch.ones(1), **learned()}.items())) == {"model.norm.weight"}


def test_layers_with_the_same_policy_share_a_table_and_learned_ones_do_not() -> None:
    for entry, weights, tables in ((LOG, {}, 1), (SSMAX, learned(), 2)):
        layers = make(entry, weights).attnscale.layers.values()
        assert len({layer.attnscale_table.data_ptr() for layer in layers}) == tables


def test_a_model_without_a_record_keeps_its_class() -> None:
    assert resolve(stub.model_config()) is stub.LlamaForCausalLM


def test_registering_twice_wraps_once() -> None:
    vllm_plugin.register()
    from vllm.model_executor.models.registry import _ModelRegistry

    once = _ModelRegistry.resolve_model_cls
    vllm_plugin.register()
    assert _ModelRegistry.resolve_model_cls is once


def test_an_exported_architecture_gets_its_native_name_back() -> None:
    vllm_plugin.register()
    from vllm.transformers_utils.config import HFConfigParser

    HFConfigParser.parsed = {"architectures": ["AttnscaleLlamaForCausalLM"], "attnscale": record_of(LOG)}
    values, config = HFConfigParser().parse("folder")
    assert values["architectures"] == config.architectures == ["LlamaForCausalLM"]
    HFConfigParser.parsed = {"architectures": ["AttnscaleLlamaForCausalLM"]}
    with pytest.raises(ArgumentError, match="no entry 'attnscale'"):
        HFConfigParser().parse("folder")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (stub.model_config(record_of({"name": "entropy_adaptive"})), "it reads scores"),
        (stub.model_config(record_of({"name": "gap_adaptive"})), "it reads scores"),
        (stub.model_config(record_of({"name": "asentmax"})), "it reads queries"),
        (stub.model_config(record_of({"name": "my_law"})), "not registered"),
        (stub.model_config(record_of(LOG, on_existing="compose")), "on_existing='compose'"),
        (stub.model_config(record_of(LOG, on_existing="replace")), "on_existing='replace'"),
        (stub.model_config(record_of(LOG), uses_mrope=True), "M-RoPE"),
        (stub.model_config(record_of(LOG), use_mla=True), "MLA"),
        (stub.model_config(hf_config=stub.Config(text_config={"attnscale": record_of(LOG)})), "multimodal"),
    ],
)
def test_what_a_config_shows_is_refused_before_a_process_starts(config: Any, reason: str) -> None:
    vllm_plugin.register()
    from vllm.model_executor.models.registry import _ModelRegistry

    for refused in (_ModelRegistry().inspect_model_cls, _ModelRegistry().resolve_model_cls):
        with pytest.raises(BackendError, match=f"LlamaForCausalLM.*{reason}.*attnscale.hf"):
            refused(["LlamaForCausalLM"], config)


def changed(**values: Any) -> stub.Attention:
    attention = stub.Attention()
    vars(attention).update(values)
    return attention


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: stub.GPT2Attention(stub.Attention()), "GPT2Attention. does not receive positions; run it"),
        (lambda: stub.LlamaAttention(stub.MLAAttention()), "uses MLAAttention"),
        (lambda: stub.LlamaAttention(nn.Identity()), "has 0 attention layers"),
        (lambda: stub.LlamaAttention(changed(attn_type="encoder_only")), "'encoder_only'"),
        (lambda: stub.LlamaAttention(changed(query_quant=nn.Identity())), "fp8"),
        (lambda: stub.LlamaAttention(changed(use_mm_prefix=True)), "images"),
        (lambda: stub.LlamaAttention(changed(impl=SimpleNamespace(alibi_slopes=[1.0]))), "ALiBi"),
    ],
)
def test_an_attention_layer_of_another_kind_is_refused_when_the_model_is_made(
    build: Any, reason: str, made: Any
) -> None:
    made(build)
    with pytest.raises(BackendError, match=f"LlamaForCausalLM.*model.layers.0.self_attn.*{reason}"):
        make(LOG)


def test_a_recorded_module_that_the_model_lacks_is_refused() -> None:
    config = stub.model_config({"modules": {"model.layers.0-2.self_attn": LOG}})
    with pytest.raises(BackendError, match=r"no module model.layers.2.self_attn.*--model-impl transformers"):
        make(LOG, config=config)


def test_pipeline_parallelism_is_refused() -> None:
    with pytest.raises(BackendError, match="pipeline"):
        make(LOG, pipeline_parallel_size=2)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0", "0.320.0"])
def test_an_untested_version_of_vllm_serves_only_models_without_a_policy(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.install(monkeypatch, version=version)
    assert resolve(stub.model_config()) is stub.LlamaForCausalLM
    with pytest.raises(BackendError, match=rf"vLLM {version} has not been tested; install vLLM 0\.32\.x"):
        resolve(stub.model_config(record_of(LOG)))


def test_a_vllm_without_the_wrapped_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.transformers_utils.config"], "HFConfigParser")
    with pytest.raises(BackendError, match=r"supported: 0\.32\.x.*VLLM_PLUGINS"):
        vllm_plugin.register()


def test_missing_learned_values_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"lacks model.layers.0.self_attn.attnscale.policy.b"):
        make(SSMAX)


def test_a_load_format_that_bypasses_load_weights_is_refused() -> None:
    config = stub.model_config(record_of(LOG))
    model: Any = resolve(config)(vllm_config=stub.vllm_config(config))
    with pytest.raises(BackendError, match="--load-format auto"):
        model.process_weights_after_loading()


def test_attention_called_outside_of_its_module_does_not_run_at_beta_1() -> None:
    attention = make(LOG).model.layers[0].self_attn.attn
    with pytest.raises(BackendError, match="outside of its attention module"):
        attention(torch.ones(1, stub.HEADS * stub.DIM))


def test_the_plugin_imports_neither_transformers_nor_attnscale_hf() -> None:
    code = (
        "import sys, attnscale.serve.vllm_plugin\n"
        "print([name for name in sys.modules if name.startswith(('transformers', 'attnscale.hf', 'vllm'))])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stdout.strip() == "[]"


def test_vllm_finds_the_plugin_through_its_entry_point() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'\[project.entry-points."vllm.general_plugins"\]\nattnscale = "(.+):(.+)"', text)
    assert found is not None
    assert getattr(importlib.import_module(found[1]), found[2]) is vllm_plugin.register
