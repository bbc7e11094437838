"""Give the attention of a transformers model a temperature policy, in place and reversibly."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from attnscale.errors import AttnScaleWarning
from attnscale.hf import selection
from attnscale.hf.attention_layers import name_layers, reject_model
from attnscale.hf.install import Handle, install
from attnscale.hf.plan import Plan, build_policies, read_plan
from attnscale.hf.pretrained_cautions import find_cautions
from attnscale.hf.probe import Inputs
from attnscale.hf.probe import probe as run_probe
from attnscale.hf.selection import Layers, OnExisting, Towers
from attnscale.policies import PolicySpec


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
    cautions = find_cautions(model, chosen, policies)  # before the config names attnscale
    handle = install(model, policies, on_existing=on_existing, override=override)
    try:
        silent = [] if probe is False else run_probe(model, chosen, None if probe is True else probe)
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
