"""Exports to GGUF, read back with gguf's reader; the same files run in llama.cpp in `make test-serving`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from attnscale.errors import ArgumentError, ExportError
from attnscale.serve.export import export_model
from attnscale.serve.export import gguf as exporter

LOG = {"name": "log", "reference_length": 32}
STEPS = {"name": "mistral", "floor_length": 16, "coefficient": 0.5}
SSMAX = {"name": "ssmax", "reference_length": 32}


class File:
    """The keys and tensors of the GGUF file in a folder."""

    def __init__(self, folder: Path) -> None:
        reader = gguf.GGUFReader(folder / "model.gguf")
        self.keys = {name: field.contents() for name, field in reader.fields.items()}
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in reader.tensors
        }


def exported(source: Path, **options: Any) -> File:
    return File(export_model(source, "gguf", source.parent / "exported", **options).path)


def test_the_temperature_is_in_the_keys_that_llama_cpp_reads(saved: Any) -> None:
    keys = exported(saved(STEPS)).keys
    assert keys["general.architecture"] == "mistral3"
    assert keys["mistral3.attention.temperature_scale"] == 0.5
    assert keys["mistral3.rope.scaling.original_context_length"] == 16


def test_a_constant_temperature_needs_no_keys(saved: Any) -> None:
    file = exported(saved({"name": "constant", "beta": 1.5}))
    assert "mistral3.attention.temperature_scale" not in file.keys
    assert "mistral3.rope.scaling.original_context_length" not in file.keys


def test_the_shape_of_the_model_is_in_the_keys(saved: Any) -> None:
    keys = exported(saved(LOG)).keys
    assert keys["mistral3.context_length"] == 1024
    assert keys["mistral3.embedding_length"] == 32
    assert keys["mistral3.block_count"] == 2
    assert keys["mistral3.feed_forward_length"] == 48
    assert keys["mistral3.attention.head_count"] == 4
    assert keys["mistral3.attention.head_count_kv"] == 2
    assert keys["mistral3.attention.key_length"] == keys["mistral3.attention.value_length"] == 8
    assert keys["mistral3.rope.dimension_count"] == 8
    assert keys["mistral3.rope.freq_base"] == 10000.0
    assert keys["mistral3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


@pytest.mark.parametrize("policy", [LOG, STEPS, SSMAX], ids=str)
def test_rows_of_q_and_k_are_interleaved_and_those_of_q_scaled(saved: Any, policy: Any) -> None:
    source = saved(policy)
    weights, file = load_file(source / "model.safetensors"), exported(source)
    names = {"q_proj": ("attn_q", 4), "k_proj": ("attn_k", 2), "v_proj": ("attn_v", None)}
    for name, (own, heads) in names.items():
        before = weights[f"model.layers.1.self_attn.{name}.weight"]
        after = file.tensors[f"blk.1.{own}.weight"]
        for head in range(heads or 0):
            rows = before[8 * head : 8 * head + 8]
            factor = 1.0
            if name == "q_proj":
                factor = float(after[8 * head].norm() / rows[0].norm())
                base = 2.0**-28 if policy is not STEPS else 1.0
                assert policy is SSMAX or factor == pytest.approx(base)
            wanted = torch.stack([rows[half * 4 + pair] for pair in range(4) for half in range(2)])
            torch.testing.assert_close(after[8 * head : 8 * head + 8], wanted * factor, rtol=1e-6, atol=0)
        if heads is None:
            assert torch.equal(before, after)


def test_the_factors_of_ssmax_are_in_the_ratio_of_its_scales(saved: Any) -> None:
    source = saved(SSMAX)
    weights, file = load_file(source / "model.safetensors"), exported(source)
    scales = weights["model.layers.0.self_attn.attnscale.policy.s"]
    before = weights["model.layers.0.self_attn.q_proj.weight"].reshape(4, -1).norm(dim=1)
    factors = file.tensors["blk.0.attn_q.weight"].reshape(4, -1).norm(dim=1) / before
    torch.testing.assert_close(factors / factors[0], scales / scales[0])


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_matrices_keep_their_dtype_and_scaled_rows_are_stored_in_fp32(
    saved: Any, dtype: torch.dtype, kind: str
) -> None:
    file = exported(saved(LOG, dtype=dtype))
    assert file.types["blk.0.attn_k.weight"] == file.types["token_embd.weight"] == kind
    assert file.types["blk.0.attn_q.weight"] == file.types["blk.0.attn_norm.weight"] == "F32"


def test_tied_embeddings_are_stored_once(saved: Any) -> None:
    assert "output.weight" not in exported(saved(LOG, tie_word_embeddings=True)).tensors


def test_scaled_rotary_frequencies_are_stored_as_divisors(saved: Any) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = saved(STEPS, rope_parameters=rope | {"original_max_position_embeddings": 64})
    divisors = exported(source).tensors["rope_freqs.weight"]
    assert divisors[0] == pytest.approx(1.0)  # a short wavelength is kept
    assert divisors[-1] == pytest.approx(8.0)  # a long one is stretched


def test_a_sliding_window_is_refused(saved: Any) -> None:
    with pytest.raises(ArgumentError, match=r"sliding_window=5 .* llama.cpp computes mistral3 with full attention"):
        exported(saved(SSMAX, tiny_models.mistral))


def test_the_tokenizer_is_converted(saved: Any) -> None:
    keys = exported(saved(LOG)).keys
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert len(keys["tokenizer.ggml.tokens"]) == 257
    assert keys["tokenizer.ggml.tokens"][256] == "ab"
    assert keys["tokenizer.ggml.merges"] == ["a b"]
    assert keys["tokenizer.ggml.eos_token_id"] == keys["tokenizer.ggml.tokens"].index("!")
    assert keys["tokenizer.ggml.add_bos_token"] is False


def test_a_larger_embedding_than_the_tokenizer_needs_is_padded(saved: Any) -> None:
    keys = exported(saved(LOG, vocab_size=260)).keys
    assert keys["tokenizer.ggml.tokens"][-3:] == ["[PAD257]", "[PAD258]", "[PAD259]"]
    assert keys["tokenizer.ggml.token_type"][-4:] == [1, 5, 5, 5]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pre_tokenizer": {"type": "Metaspace"}}, None),
        ({"normalizer": {"type": "NFC"}}, None),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, None),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, None),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}],
                }
            },
            "smollm",
        ),
    ],
)
def test_only_tokenizers_that_llama_cpp_has_a_name_for_are_converted(saved: Any, change: Any, name: str | None) -> None:
    source = saved(LOG)
    file = source / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if name is not None:
        assert exported(source).keys["tokenizer.ggml.pre"] == name
        return
    with pytest.raises(ArgumentError, match=r"expected a byte-level BPE with merges .* with --tokenizer FILE"):
        exported(source)
    assert list(source.parent.iterdir()) == [source]


def test_a_tokenizer_can_be_copied_from_another_file(saved: Any, tmp_path: Path) -> None:
    source = saved(LOG)
    first = exported(source)
    shutil.move(tmp_path / "exported", tmp_path / "first")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ArgumentError, match=r"it has no tokenizer.json; give a GGUF file"):
        exported(source)
    second = exported(source, tokenizer=tmp_path / "first" / "model.gguf")
    own = {key: value for key, value in first.keys.items() if key.startswith("tokenizer.")}
    assert own.items() <= second.keys.items()


def test_a_tokenizer_of_another_size_is_refused(saved: Any, tmp_path: Path) -> None:
    exported(saved(LOG))
    source = saved(LOG, vocab_size=300)
    with pytest.raises(ArgumentError, match="a tokenizer of 300 tokens, as in the model; this one has 257"):
        export_model(source, "gguf", tmp_path / "other", tokenizer=tmp_path / "exported" / "model.gguf")
    (tmp_path / "text").write_text("no GGUF")
    with pytest.raises(ArgumentError, match=r"tokenizer='.*text' is not accepted: expected a GGUF file"):
        export_model(source, "gguf", tmp_path / "other", tokenizer=tmp_path / "text")


def test_rows_in_the_wrong_order_are_noticed(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(LOG)
    monkeypatch.setattr(exporter, "_interleaved", lambda weight, heads: weight)
    with pytest.raises(ExportError, match="differs from the source"):
        exported(source)
    assert list(source.parent.iterdir()) == [source]


def test_scaled_rows_do_not_survive_a_quantisation_with_fp16_scales(saved: Any) -> None:
    # Why README.md keeps attn_q out of llama-quantize.
    rows = exported(saved(LOG)).tensors["blk.0.attn_q.weight"].numpy()
    packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert not numpy.any(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
