"""The vLLM plugin: serves checkpoints with a policy, natively and with `--model-impl transformers`, or refuses them.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It wraps three functions of vLLM:
the config parser, which turns `AttnscaleLlamaForCausalLM` back into the native architecture name, and the inspection
and resolution of model classes. A config with a record gets a subclass of its model class. The subclass multiplies the
queries by β where the layer `Attention` receives them, after rotation and normalisation. The positions are those with
which the parent of that layer, the attention module of the model, was called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnscale._util.wrapping import wrap_method
from attnscale.errors import ArgumentError, BackendError
from attnscale.policies.base import LengthPolicy
from attnscale.policies.record import (
    ARCHITECTURE_PREFIX,
    NAME,
    ON_EXISTING,
    build_described,
    describe,
    find_record,
    is_of_policy,
    locate,
    read_modules,
    split_name,
)
from attnscale.serve.tables import LayerShape, beta_table, check_has_table, layer_policies

# Minor versions of vLLM for which `make test-serving` has passed.
SUPPORTED = ("0.32",)

_ELSEWHERE = "run it with transformers and attnscale.hf"
_TRANSFORMERS = f"serve it with --model-impl transformers, or {_ELSEWHERE}"

# Buffer of an `Attention` with a policy: β [max_model_len, local heads or 1]; and the positions of the current call.
_TABLE, _POSITIONS = "attnscale_table", "attnscale_positions"


def register() -> None:
    """Wrap vLLM's config parser and model registry. Idempotent.

    Raises:
        BackendError: this version of vLLM has no such functions.
    """
    try:
        from vllm.model_executor.models.registry import _ModelRegistry
        from vllm.transformers_utils.config import HFConfigParser

        wrap_method(HFConfigParser, "parse", _parse_config)
        wrap_method(_ModelRegistry, "inspect_model_cls", _inspect_class)
        wrap_method(_ModelRegistry, "resolve_model_cls", _resolve_class)
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"the vLLM plugin of attnscale does not support this version of vLLM: {error}; supported: "
            f"{_supported()}. To serve models without a policy, exclude the plugin with VLLM_PLUGINS"
        ) from error


def _supported() -> str:
    return ", ".join(f"{version}.x" for version in SUPPORTED)


def _parse_config(stock: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
    """`HFConfigParser.parse`: restores the native names of architectures written by `attnscale export --to vllm`."""
    values, config = stock(*args, **kwargs)
    names = getattr(config, "architectures", None) or []
    if any(name.startswith(ARCHITECTURE_PREFIX) for name in names):
        if _record_of(config) is None:
            raise ArgumentError(f"architectures={names!r} is not accepted: config.json has no entry {NAME!r}")
        config.architectures = [name.removeprefix(ARCHITECTURE_PREFIX) for name in names]
        values = {**values, "architectures": config.architectures}
    return values, config


def _inspect_class(stock: Callable[..., Any], registry: Any, architectures: Any, model_config: Any) -> Any:
    """`inspect_model_cls`, called for every config: refuses what is known to fail before a process is started."""
    record = _record_of(model_config.hf_config)
    if record is not None:
        _check_config(record, model_config, str(architectures))
    return stock(registry, architectures, model_config)


def _resolve_class(stock: Callable[..., Any], registry: Any, architectures: Any, model_config: Any) -> Any:
    """`resolve_model_cls`, called for every model: returns a subclass for a config with a record."""
    kind, architecture = stock(registry, architectures, model_config)
    record = _record_of(model_config.hf_config)
    if record is None:
        return kind, architecture
    _check_config(record, model_config, kind.__name__)
    return _served_class(kind, record), architecture


def _record_of(config: Any) -> Mapping[str, Any] | None:
    """Return the record in a transformers config, also in a nested one."""
    return find_record(config.to_dict())


def _refuse(name: str, reason: str, advice: str = _ELSEWHERE) -> BackendError:
    return BackendError(f"{name} with a policy of attnscale is not served: {reason}; {advice}")


def _check_config(record: Mapping[str, Any], model_config: Any, name: str) -> None:
    """Raise if a policy cannot be served, as far as configs tell."""
    import vllm

    if not vllm.__version__.startswith(tuple(f"{version}." for version in SUPPORTED)):
        advice = f"install vLLM {_supported()}, or {_ELSEWHERE}"
        raise _refuse(name, f"vLLM {vllm.__version__} has not been tested", advice)
    if getattr(model_config.hf_config, NAME, None) is None:
        raise _refuse(name, "the policy is that of a part of a multimodal model")
    if ON_EXISTING in record:
        reason = f"on_existing={record[ON_EXISTING]!r}, because the model also scales its logits itself"
        raise _refuse(name, reason)
    if model_config.uses_mrope:
        raise _refuse(name, "multimodal rotary positions (M-RoPE) do not count keys")
    if getattr(model_config, "use_mla", False):
        raise _refuse(name, "multi-head latent attention (MLA) has no layer that receives whole queries")
    text = model_config.hf_text_config
    shape = {"num_heads": text.num_attention_heads, "head_dim": getattr(text, "head_dim", None) or 1}
    for path, entry in read_modules(record).items():
        try:
            check_has_table(build_described(entry, **shape), path)
        except ArgumentError as error:
            raise _refuse(name, str(error)) from error


def _served_class(kind: type[nn.Module], record: Mapping[str, Any]) -> type[nn.Module]:
    """Return a subclass of a model class that applies the policies of a record."""

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        kind.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.attnscale = ServedPolicies(self, record, vllm_config)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        learned: dict[str, Tensor] = {}

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                if is_of_policy(name):
                    learned[name] = value.to("cpu", copy=True)
                else:
                    yield name, value

        loaded = kind.load_weights(self, others())  # type: ignore[attr-defined]
        self.attnscale.load(learned)
        return loaded

    def process_weights_after_loading(self: Any) -> None:
        self.attnscale.check_loaded()
        if hasattr(kind, "process_weights_after_loading"):
            kind.process_weights_after_loading(self)

    methods = (__init__, load_weights, process_weights_after_loading)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {method.__name__: method for method in methods} | names)


class ServedPolicies:
    """The policies of a model in vLLM: checks every attention layer, and gives it its table of β.

    Args:
        model: the model, before its weights are loaded.
        record: the entry `attnscale` of its config.
        vllm_config: the `VllmConfig`.

    Raises:
        BackendError: an attention layer with a policy is missing or of a kind that is not supported.
    """

    def __init__(self, model: nn.Module, record: Mapping[str, Any], vllm_config: Any) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.name = type(model).__name__
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise _refuse(self.name, "pipeline parallelism has not been tested", "use --tensor-parallel-size")
        self.length: int = vllm_config.model_config.max_model_len
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        modules, transformers = dict(model.named_modules()), _is_of_transformers(model)
        recorded = read_modules(record)
        found = locate(recorded, modules, "model")
        self.record = record
        self.layers: dict[str, Any] = {}  # recorded path → `Attention`
        for path in recorded:
            if path not in found:
                advice = _ELSEWHERE if transformers else _TRANSFORMERS
                raise _refuse(self.name, f"vLLM's implementation has no module {path}", advice)
            self.layers[path] = self._install(path, modules[found[path]], transformers)
        self.shapes = {
            path: LayerShape(attention.num_heads * self.ranks, attention.head_size)
            for path, attention in self.layers.items()
        }

    def load(self, learned: Mapping[str, Tensor]) -> None:
        """Fill the tables, with the learned values of a checkpoint."""
        own = {name: value for name, value in learned.items() if split_name(name)[0] in self.layers}
        with torch.device("cpu"):  # vLLM makes models under the device of the engine
            policies = layer_policies(self.record, self.shapes, own, self.dtype)
        shared: dict[Any, Tensor] = {}
        for path, policy in policies.items():
            attention = self.layers[path]
            key = path if policy.state_dict() else (repr(describe(policy)), attention.sliding_window)
            if key not in shared:
                shared[key] = self._table(policy, attention)
            attention.register_buffer(_TABLE, shared[key], persistent=False)

    def _table(self, policy: LengthPolicy, attention: Any) -> Tensor:
        """Return β [positions, local heads or 1] on the device of the engine."""
        with torch.device("cpu"):
            table = beta_table(policy, self.length, attention.sliding_window)
        if table.shape[1] > 1:
            table = table.chunk(self.ranks, dim=1)[self.rank].contiguous()
        return table.to(attention._k_scale.device)

    def check_loaded(self) -> None:
        """Raise if a layer has no table: a load format that does not call `load_weights`."""
        if any(getattr(attention, _TABLE, None) is None for attention in self.layers.values()):
            raise _refuse(self.name, "this load format does not read the policies", "use --load-format auto")

    def _install(self, path: str, module: nn.Module, transformers: bool) -> Any:
        """Give an attention module and its `Attention` the subclasses that apply β; return the latter."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        where = f"{path} ({type(module).__name__})"
        advice = _ELSEWHERE if transformers else _TRANSFORMERS
        inner = {name: child for name, child in module.named_children() if isinstance(child, AttentionLayerBase)}
        if len(inner) != 1:
            raise _refuse(self.name, f"{where} has {len(inner)} attention layers of vLLM, not one", advice)
        (attention,) = inner.values()
        if type(attention) is not Attention or attention.attn_type != "decoder":
            reason = f"{where} uses {type(attention).__name__} of type {getattr(attention, 'attn_type', 'unknown')!r}"
            raise _refuse(self.name, reason, advice)
        if attention.query_quant is not None:
            raise _refuse(self.name, f"{where} quantises queries to fp8", "use --kv-cache-dtype auto")
        if attention.use_mm_prefix:
            raise _refuse(self.name, f"{where} has bidirectional attention to images")
        if getattr(attention.impl, "alibi_slopes", None) is not None:
            raise _refuse(self.name, f"{where} adds ALiBi to the logits")
        parameters = list(inspect.signature(module.forward).parameters)
        argument = "position_ids" if transformers else "positions"
        missing = _refuse(self.name, f"{where} does not receive positions")
        if not transformers and argument not in parameters:
            raise missing
        index = parameters.index(argument) if argument in parameters else len(parameters)
        attention.__class__ = _scaled_attention(type(attention))
        # Of the instance: vLLM's transformers backend replaces the forward of instances.
        module.forward = _with_positions(module.forward, attention, argument, index, missing)
        return attention


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is that of transformers, in vLLM's backend."""
    from vllm.model_executor.models.transformers.base import Base

    return isinstance(model, Base)


def _scaled_attention(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `Attention` that multiplies the queries by β, in fp32 and rounded once."""

    def forward(self: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        positions = getattr(self, _POSITIONS)
        if positions is None:
            raise BackendError(f"{self.layer_name} was called outside of its attention module")
        beta = getattr(self, _TABLE)[positions]  # [T, H|1]
        rows = query.reshape(-1, self.num_heads, self.head_size)
        scaled = (rows.to(torch.float32) * beta.unsqueeze(-1)).to(query.dtype)
        output: Tensor = kind.forward(self, scaled.reshape(query.shape), *args, **kwargs)
        return output

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"forward": forward, _POSITIONS: None} | names)


def _with_positions(
    stock: Callable[..., Any], attention: Any, argument: str, index: int, missing: BackendError
) -> Callable[..., Any]:
    """Return the `forward` of an attention module that hands its positions to its `Attention`.

    `missing` is raised in vLLM's first forward pass if the module gets no positions.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        positions = kwargs[argument] if argument in kwargs else args[index] if index < len(args) else None
        if positions is None:
            raise missing
        setattr(attention, _POSITIONS, positions.reshape(-1))
        output = stock(*args, **kwargs)
        setattr(attention, _POSITIONS, None)
        return output

    return forward
