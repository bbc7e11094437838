"""Put policies into a transformers model, check that it calls them, and take them out again."""

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
from attnscale.hf.existing import find_existing
from attnscale.hf.plan import Plan, build_policies, read_plan
from attnscale.hf.selection import Layers, OnExisting, Towers
from attnscale.hf.sites import SDPA, Site, remove_site, site_of
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.adaptive import assumed_estimates
from attnscale.policies.record import NAME, write_record
from attnscale.policies.settle import settle

# The files that `handle.save` writes.
POLICY_CONFIG = "attnscale_config.json"
POLICY_WEIGHTS = "attnscale_policy.safetensors"

Inputs = Mapping[str, Any]


class Handle(Removable):
    """The policies of a model. `remove()` takes them out; as a context manager it does so at the end.

    `policies` maps the path of each attention module that has a policy to it; `record` is what the config says of them.
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

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the policies: give these to the optimizer to train them alone."""
        found = [p for policy in self.policies.values() if isinstance(policy, nn.Module) for p in policy.parameters()]
        return list(dict.fromkeys(found))

    def save(self, folder: str | Path) -> None:
        """Write the policies and what they have learned, without the model: a few kB for `attnscale.hf.load_policy`.

            handle.save("run/policy")
            handle = attnscale.hf.load_policy(model, "run/policy")

        A file is written whole or not at all.
        """
        folder = Path(folder)
        learned: dict[str, Tensor] = {}
        for path, policy in by_inner_path(self.policies, self.model).items():
            for name, value in policy.state_dict().items() if isinstance(policy, nn.Module) else ():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # of a sharded one, all of it
                learned[f"{path}.{NAME}.policy.{name}"] = whole.detach().cpu().contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        if learned:
            save = need("safetensors.torch", "handle.save", "hf").save
            write_whole(folder / POLICY_WEIGHTS, save(learned, metadata={"format": "pt"}))
        write_whole(folder / POLICY_CONFIG, json.dumps(self.record, indent=2, sort_keys=True) + "\n")
        if not learned:
            (folder / POLICY_WEIGHTS).unlink(missing_ok=True)  # of policies that were saved here before

    def remove(self) -> None:
        """Restore the model as it was, to the bit. Idempotent, also after another handle of the same policies."""
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
    """Let the attention of a transformers model scale its logits by β(n), from now on and until `handle.remove()`.

    Build the optimizer afterwards: the parameters of a policy belong to the attention modules. If this raises, the
    model is unchanged. An `AttnScaleWarning` tells of policies that probably harm a pretrained model.

    Args:
        model: any model, or wrapper of one (PEFT, DDP), whose attention goes through transformers' interface.
        policy: whatever `build_policy` takes, with its keywords; or a mapping or YAML file with `default`, `layers`
            ({"4-11": policy}) and `heads` ({"0-3": policy}). Of a finished policy each module gets a copy, with what
            it has learned.
        layers: "all"; "full", those without a sliding window; "nope", those without rotary embedding; a range such as
            "4-11"; a number, or several.
        cross: also cross attention, whose n is the number of encoder states that a row sees.
        towers: "text", or "all" for vision and speech encoders too.
        on_existing: what to do where the model scales its logits by length already: "raise", "compose" (β comes on
            top) or "replace" (its own scaling is switched off).
        override: keep the implementation "sdpa", the only one that continuous batching takes, and compute under it.
        probe: prove with a forward of four tokens that every module calls its policy; pass the model's inputs where
            they are not tokens, or False to go without.
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
            advice = "leave it out with layers=..., or pass inputs that reach it as probe={...}"
            path = name_layers(silent)
            reject_model(model, f"a forward did not reach {path}, which would stay without a policy; {advice}")
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
    """Give the modules at these paths these policies, and every other attention module the note that it has none.

    `loaded`: removing the handle is to leave what transformers would have chosen, not our name with which the model was
    loaded. If this raises, the model is unchanged.
    """
    if any(isinstance(policy, nn.Module) and any(True for _ in policy.parameters()) for policy in policies.values()):
        _refuse_wrapped(model)
    layers = list(routed_layers(model).values())
    chosen = [layer for layer in layers if layer.path in policies]
    selection.refuse_applied(model, chosen)
    modules, inner = [layer.module for layer in layers], transformers_model(model)
    record = write_record(by_inner_path(policies, model), on_existing)
    switched: list[PreTrainedConfig] = []
    # All are found before any is switched off: layers share the module that applies the factor.
    existing = {layer.path: find_existing(model, layer) if on_existing == "replace" else [] for layer in chosen}
    try:
        for layer in chosen:
            site = _make_site(policies[layer.path], layer.module, override, on_existing)
            layer.module.add_module(NAME, site.train(layer.module.training))
            for scaling in existing[layer.path]:
                site.undo.append(scaling.switch_off())
        for module in modules:
            module._modules.setdefault(NAME, None)  # the note that it has no policy, which copies keep
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
    """Policies by their paths in the transformers model itself, without those of a wrapper."""
    return {path: policies[layer.path] for path, layer in routed_layers(model).items() if layer.path in policies}


def _take_out(modules: Sequence[nn.Module], configs: Sequence[PreTrainedConfig]) -> None:
    """Restore attention modules, the last first, and then their configs."""
    for module in reversed(modules):
        remove_site(module)
    for config in configs:
        release(config)


def _make_site(policy: Policy, module: nn.Module, override: bool, on_existing: str) -> Site:
    """A site for an attention module; where PEFT is installed, of the class that it trains and saves."""
    # The parameters of an offloaded module are elsewhere than where it computes.
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    settle(policy, module, None if device is None else torch.device(device))
    if find_spec("peft") is None:
        return Site(policy, override)
    from attnscale.hf.peft_sites import PeftSite  # needs peft, which is optional

    return PeftSite(policy, override, on_existing)


def _configs(
    inner: PreTrainedModel, chosen: list[AttentionLayer], override: bool
) -> list[tuple[PreTrainedConfig, str | None]]:
    """Configs to switch, and to which implementation; None where only the record is kept there."""
    used = {id(layer.config): layer.config for layer in chosen}
    top = inner.config
    if not getattr(top, "sub_configs", None):
        used[id(top)] = top  # the one that is saved: stacks may hold copies
    implementation = SDPA if override else NAME
    for config in used.values():
        if override and config._attn_implementation != SDPA:
            reject("attn_implementation", config._attn_implementation, f"{SDPA!r} with override=True")
    # A part that was loaded with our name, and has no policy, has to be set back too when the handle is removed.
    others = [config for config in configs_of(inner) if config is top or config._attn_implementation == NAME]
    return [(config, implementation) for config in used.values()] + [
        (config, None) for config in others if id(config) not in used
    ]


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse to add parameters to a model that a data-parallel wrapper holds, which would not synchronise them."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    own = {id(module) for module in model.modules()}
    # A model does not know what wraps it, and `wrapper.module` may be what was passed: look through all live modules.
    live: list[nn.Module] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    for kind in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule):
        name = "fully_shard" if kind is FSDPModule else kind.__name__
        for wrapper in (module for module in live if isinstance(module, kind)):
            if id(wrapper) in own or any(module is model for module in wrapper.modules()):
                raise ArgumentError(
                    f"model={type(model).__name__} is not accepted: {name} holds it already and would not synchronise "
                    f"what the policy learns; call attnscale.hf.apply first, then {name}(model), then build the "
                    "optimizer"
                )


def _uncalled(model: nn.Module, layers: list[AttentionLayer], inputs: Inputs | None = None) -> list[AttentionLayer]:
    """Run a model once and return those of the layers whose site was not called.

    In a model of several towers, layers that its main input does not reach are proven by a forward of their tower. The
    model and the random number generators stay as they are.
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
                _run_probe(part, _probe_inputs(part))  # a part that cannot run alone proves nothing, and is no failure
    finally:
        for hook in hooks:
            hook.remove()
    silent = [layer for layer, site in zip(layers, sites, strict=True) if site not in called]
    if failure is not None and (silent or inputs is not None):
        raise ArgumentError(
            f"the probe forward of {type(model).__name__} with {sorted(given)} failed: {failure!r}. Pass inputs that "
            "the model takes as probe={...}, or probe=False to go without the proof"
        ) from failure
    return silent


def _run_probe(model: nn.Module, inputs: Inputs) -> Exception | None:
    """The exception of a forward in evaluation mode, if any; a refusal of attnscale itself is raised.

    Modes and random number generators are restored.
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
    """Four tokens; or an image, waveform or spectrogram of zeros; or the model's own dummy inputs."""
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
    """The shape of an input that is not tokens, where the config says it."""
    size, stride, bins = (getattr(config, key, None) for key in ("image_size", "conv_stride", "num_mel_bins"))
    if name == "pixel_values" and size is not None:
        return 1, getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size)
    if name == "input_values" and stride is not None:
        return 1, 8 * math.prod(stride)
    if name == "input_features" and bins is not None and hasattr(config, "max_source_positions"):
        return 1, bins, 2 * config.max_source_positions
    return None
