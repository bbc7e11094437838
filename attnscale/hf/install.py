"""Apply policies to a transformers model, check that the model calls them, and remove them."""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale._util.files import write_whole
from attnscale._util.handles import Removable
from attnscale._util.optional import need
from attnscale.errors import ArgumentError, AttnScaleWarning, reject
from attnscale.hf import selection
from attnscale.hf.attention_layers import AttentionLayer, name_layers, reject_model, routed_layers, transformers_model
from attnscale.hf.config_record import configs_of, release, save_implementation, switch
from attnscale.hf.plan import Plan, build_policies, read_plan
from attnscale.hf.selection import Layers, OnExisting, Towers
from attnscale.hf.sites import SDPA, Site, remove_site, site_of
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.adaptive import assumed_estimates
from attnscale.policies.record import NAME, write_record
from attnscale.policies.settle import settle

# Files written by `handle.save`.
POLICY_CONFIG = "attnscale_config.json"
POLICY_WEIGHTS = "attnscale_policy.safetensors"

Inputs = Mapping[str, Any]


class Handle(Removable):
    """The policies applied to a model. `remove()` restores the model; the handle is also a context manager.

    Attributes:
        model: the model, including its wrapper if it has one.
        policies: module path → policy, for every attention module with a policy.
        record: the policies as plain data, as stored in `config.attnscale`.

    Example:
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
        >>> with attnscale.hf.apply(model, "ssmax") as handle:
        ...     [tuple(parameter.shape) for parameter in handle.parameters()]  # one scale per head
        [(4,)]
        >>> model.config._attn_implementation
        'sdpa'
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, Policy],
        record: Mapping[str, Any],
        configs: Sequence[PreTrainedConfig],
    ) -> None:
        self.model = model
        self.policies = dict(policies)
        self.record = dict(record)
        modules = [layer.module for layer in routed_layers(model).values()]
        self._sites = [(module, site_of(module)) for module in modules]
        self._configs = list(configs)

    def __repr__(self) -> str:
        name, number = type(transformers_model(self.model)).__name__, len(self.policies)
        if not self._sites:
            return f"<Handle of {name}: removed>"
        different = dict.fromkeys(map(_short_repr, self.policies.values()))
        shown = next(iter(different), "no policy") + (" and others" if len(different) > 1 else "")
        return f"<Handle of {name}: {shown} in {number} layer{'' if number == 1 else 's'}>"

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the policies, to pass to an optimizer that trains only them."""
        found = [p for policy in self.policies.values() if isinstance(policy, nn.Module) for p in policy.parameters()]
        return list(dict.fromkeys(found))

    def save(self, folder: str | Path) -> None:
        """Write the policies and their learned values, without the model, for `attnscale.hf.load_policy`.

        The files take a few kB. Each file is written atomically.

        Args:
            folder: created if it does not exist.
        """
        folder = Path(folder)
        learned: dict[str, Tensor] = {}
        for path, policy in by_inner_path(self.policies, self.model).items():
            for name, value in policy.state_dict().items() if isinstance(policy, nn.Module) else ():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # gathers a sharded tensor
                learned[f"{path}.{NAME}.policy.{name}"] = whole.detach().cpu().contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        if learned:
            save = need("safetensors.torch", "handle.save", "hf").save
            write_whole(folder / POLICY_WEIGHTS, save(learned, metadata={"format": "pt"}))
        write_whole(folder / POLICY_CONFIG, json.dumps(self.record, indent=2, sort_keys=True) + "\n")
        if not learned:
            (folder / POLICY_WEIGHTS).unlink(missing_ok=True)  # left by an earlier save

    def remove(self) -> None:
        """Restore the original model, bit for bit. Idempotent, even if another handle removed the same policies."""
        if any(site is not None and site_of(module) is site for module, site in self._sites):
            _take_out([module for module, _ in self._sites], self._configs)
        self._sites, self._configs = [], []


def apply(
    model: nn.Module,
    policy: PolicySpec | Plan,
    *,
    layers: Layers = "all",
    cross: bool = False,
    towers: Towers = "text",
    on_existing: OnExisting = "raise",
    override: bool = False,
    probe: bool | Inputs = True,
    **parameters: Any,
) -> Handle:
    """Scale the attention logits of a transformers model by β(n), until `handle.remove()`.

    Policies become child modules of the attention modules, so build the optimizer afterwards. Issues an
    `AttnScaleWarning` for a policy that is likely to harm a pretrained model. On an exception the model is unchanged.

    Args:
        model: a transformers model that dispatches through `AttentionInterface`, or a wrapper of one (PEFT, DDP).
        policy: anything accepted by `build_policy`, or a plan: a mapping or YAML file with `default`, `layers`
            ({"4-11": policy}) and `heads` ({"0-3": policy}). Every module gets its own copy of a policy instance,
            including its learned values.
        layers: "all"; "full" (layers without a sliding window); "nope" (layers without rotary embedding); a range
            such as "4-11"; an int or a sequence of ints.
        cross: include cross-attention, where n is the number of visible encoder states.
        towers: "text", or "all" to include vision and speech encoders.
        on_existing: for models that already scale their logits by length: "raise", "compose" (multiply by β on top)
            or "replace" (disable the model's own scaling).
        override: keep the implementation name "sdpa", which continuous batching requires.
        probe: run a four-token forward pass to check that every selected module calls its policy. Pass a mapping of
            model inputs for models without token inputs, or False to skip the check.
        **parameters: parameters of the policy, as in `build_policy`.

    Returns:
        A `Handle`: `remove()`, `parameters()`, `save(folder)`; also a context manager.

    Raises:
        ArgumentError: an argument is invalid, the model or a selected layer is not supported, or it already has a
            policy or a scaling of its own.
        ArgumentTypeError: `model` is not a transformers model, or `policy` is a model.

    Example:
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
        >>> handle = attnscale.hf.apply(model, "log", reference_length=8192, floor=True, layers=[1])
        >>> handle.policies
        {'transformer.h.1.attn': Log(...reference_length=8192...)}
        >>> handle.remove()
    """
    selection.refuse_model_as_policy(model, policy)
    plan = read_plan(policy, **parameters)
    chosen = selection.select(model, layers=layers, cross=cross, towers=towers)
    selection.refuse_unsupported(model, chosen)
    selection.refuse_applied(model, chosen)
    selection.refuse_existing(model, chosen, on_existing)
    plan.check(max(layer.layer for layer in chosen) + 1)
    policies = build_policies(plan, chosen)
    cautions = selection.find_cautions(model, chosen, policies)  # before the config names attnscale
    handle = install(model, policies, on_existing=on_existing, override=override)
    try:
        silent = [] if probe is False else _uncalled(model, chosen, None if probe is True else probe)
        if silent:
            advice = "exclude it with layers=..., or pass inputs that reach it as probe={...}"
            path = name_layers(silent)
            reject_model(model, f"the probe forward pass did not reach {path}; {advice}")
        for caution in cautions:
            warnings.warn(caution, AttnScaleWarning, stacklevel=2)
    except BaseException:
        handle.remove()
        raise
    return handle


def install(
    model: nn.Module,
    policies: Mapping[str, Policy],
    *,
    on_existing: str = "raise",
    override: bool = False,
    loaded: bool = False,
) -> Handle:
    """Install policies at the given module paths and mark every other attention module as having none.

    With `loaded`, removing the handle selects transformers' default implementation, not "attnscale", with which the
    model was loaded. On an exception the model is unchanged.
    """
    if any(isinstance(policy, nn.Module) and any(True for _ in policy.parameters()) for policy in policies.values()):
        _refuse_wrapped(model)
    layers = list(routed_layers(model).values())
    chosen = [layer for layer in layers if layer.path in policies]
    selection.refuse_applied(model, chosen)
    modules, inner = [layer.module for layer in layers], transformers_model(model)
    record = write_record(by_inner_path(policies, model), on_existing)
    switched: list[PreTrainedConfig] = []
    # Find all of them before disabling any: layers share the module that applies the factor.
    existing = {layer.path: selection.replaceable(model, layer) if on_existing == "replace" else [] for layer in chosen}
    try:
        for layer in chosen:
            site = _make_site(policies[layer.path], layer.module, override, on_existing)
            layer.module.add_module(NAME, site.train(layer.module.training))
            for scaling in existing[layer.path]:
                site.undo.append(scaling.switch_off())
        for module in modules:
            module._modules.setdefault(NAME, None)  # marks a module without a policy; survives copying
        configs = _configs(inner, chosen, override)
        for config, implementation in configs:
            switch(config, implementation, record, inner if loaded else None)
            switched.append(config)
        save_implementation(inner.config, [config for config, implementation in configs if implementation is not None])
    except BaseException:
        _take_out(modules, switched)
        raise
    return Handle(model, policies, record, switched)


def by_inner_path(policies: Mapping[str, Policy], model: nn.Module) -> dict[str, Policy]:
    """Return policies keyed by module path inside the transformers model, without the prefix of a wrapper."""
    return {path: policies[layer.path] for path, layer in routed_layers(model).items() if layer.path in policies}


def _short_repr(policy: Policy) -> str:
    """Return the repr of a policy if it fits in a line, else its class name."""
    text = repr(policy)
    return text if len(text) <= 80 and "\n" not in text else f"{type(policy).__name__}(...)"


def _take_out(modules: Sequence[nn.Module], configs: Sequence[PreTrainedConfig]) -> None:
    """Restore attention modules in reverse order, then their configs."""
    for module in reversed(modules):
        remove_site(module)
    for config in configs:
        release(config)


def _make_site(policy: Policy, module: nn.Module, override: bool, on_existing: str) -> Site:
    """Return a site for an attention module: a `PeftSite` if PEFT is installed."""
    # An offloaded module computes on another device than the one that holds its parameters.
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    settle(policy, module, None if device is None else torch.device(device))
    if find_spec("peft") is None:
        return Site(policy, override)
    from attnscale.hf.peft_sites import PeftSite  # peft is optional

    return PeftSite(policy, override, on_existing)


def _configs(
    inner: PreTrainedModel, chosen: list[AttentionLayer], override: bool
) -> list[tuple[PreTrainedConfig, str | None]]:
    """Return the configs to switch, each with its new implementation, or None to add only the record."""
    used = {id(layer.config): layer.config for layer in chosen}
    top = inner.config
    if not getattr(top, "sub_configs", None):
        used[id(top)] = top  # the config that is saved; submodules may hold copies
    implementation = SDPA if override else NAME
    for config in used.values():
        if override and config._attn_implementation != SDPA:
            reject("attn_implementation", config._attn_implementation, f"{SDPA!r} with override=True")
    # A part loaded as "attnscale" but without a policy must also be restored when the handle is removed.
    others = [config for config in configs_of(inner) if config is top or config._attn_implementation == NAME]
    return [(config, implementation) for config in used.values()] + [
        (config, None) for config in others if id(config) not in used
    ]


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise if a data-parallel wrapper already holds the model: it would not synchronise new parameters."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    own = {id(module) for module in model.modules()}
    # Modules have no reference to their wrapper, and `model` may be `wrapper.module`: search all live modules.
    live: list[nn.Module] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    for kind in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule):
        name = "fully_shard" if kind is FSDPModule else kind.__name__
        for wrapper in (module for module in live if isinstance(module, kind)):
            if id(wrapper) in own or any(module is model for module in wrapper.modules()):
                raise ArgumentError(
                    f"model={type(model).__name__} is not accepted: it is already wrapped in {name}, which would not "
                    f"synchronise the parameters of the policy; call attnscale.hf.apply first, then {name}(model), "
                    "then build the optimizer"
                )


def _uncalled(model: nn.Module, layers: list[AttentionLayer], inputs: Inputs | None = None) -> list[AttentionLayer]:
    """Run one forward pass and return the layers whose site was not called.

    Towers that the main input does not reach get a forward pass of their own. The state of the model and of the random
    number generators is preserved.
    """
    called: set[nn.Module] = set()
    sites = [site for layer in layers if (site := site_of(layer.module)) is not None]
    hooks = [site.register_forward_hook(lambda site, *_: called.add(site)) for site in sites]
    given = _probe_inputs(model) if inputs is None else dict(inputs)
    try:
        failure = _run_probe(model, given)
        parts = list(transformers_model(model).modules())[1:] if inputs is None else []
        for part in (module for module in parts if isinstance(module, PreTrainedModel)):
            if not called.issuperset(module for module in part.modules() if module in sites):
                _run_probe(part, _probe_inputs(part))  # a part that cannot run on its own is not an error
    finally:
        for hook in hooks:
            hook.remove()
    silent = [layer for layer, site in zip(layers, sites, strict=True) if site not in called]
    if failure is not None and (silent or inputs is not None):
        raise ArgumentError(
            f"the probe forward pass of {type(model).__name__} with inputs {sorted(given)} failed: {failure!r}. Pass "
            "valid model inputs as probe={...}, or probe=False to skip the check"
        ) from failure
    return silent


def _run_probe(model: nn.Module, inputs: Inputs) -> Exception | None:
    """Run a forward pass in evaluation mode and return its exception, if any; an `ArgumentError` is raised.

    Training modes and random number generators are restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), assumed_estimates(model):
            model(**inputs)
    except ArgumentError:
        raise
    except Exception as error:
        return error
    finally:
        for module, training in modes:
            module.training = training
    return None


def _probe_inputs(model: nn.Module) -> dict[str, Any]:
    """Return four tokens, a zero image, waveform or spectrogram, or the model's own dummy inputs."""
    inner = transformers_model(model)
    device = next((parameter.device for parameter in inner.parameters()), torch.device("cpu"))
    name, tokens = inner.main_input_name, torch.ones(1, 4, dtype=torch.int64, device="cpu")
    shape = _probe_shape(inner.config, name)
    inputs: dict[str, Any]
    if name == "input_ids":
        inputs = {name: tokens}
    elif shape is not None:
        inputs = {name: torch.zeros(shape, device="cpu")}
    else:
        with torch.device("cpu"):
            inputs = dict(inner.dummy_inputs)
    if inner.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = tokens
    return {
        name: value.to(device, inner.dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }


def _probe_shape(config: PreTrainedConfig, name: str) -> tuple[int, ...] | None:
    """Return the shape of a non-token input if the config determines it."""
    size, stride, bins = (getattr(config, key, None) for key in ("image_size", "conv_stride", "num_mel_bins"))
    if name == "pixel_values" and size is not None:
        return 1, getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size)
    if name == "input_values" and stride is not None:
        return 1, 8 * math.prod(stride)
    if name == "input_features" and bins is not None and hasattr(config, "max_source_positions"):
        return 1, bins, 2 * config.max_source_positions
    return None
