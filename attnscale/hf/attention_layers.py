"""The attention layers of a transformers model, read from its modules and source code without running it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NoReturn

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError, ArgumentTypeError, reject_type
from attnscale.policies.record import split_number

# Names used in modeling files: the registry of attention functions, and the variable for the selected function.
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_CALLED = "attention_interface"

# Names, besides `self`, that may occur in an expression evaluated without a forward pass.
_EVALUABLE: Final = {"getattr": getattr, "hasattr": hasattr, "isinstance": isinstance, "len": len}

UNKNOWN: Final = object()  # a value that only a forward pass determines

_Test = tuple[ast.expr, bool]  # the condition of an `if`, and its required value

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_CROSS = re.compile(r"cross|encdec|enc_dec|encoder_attn|encoder_decoder", re.IGNORECASE)
_NOT_TEXT = re.compile(r"vision|visual|image|video|audio|speech", re.IGNORECASE)

# Keywords that pass the keys selected by an indexer. Ignoring them would silently give dense attention.
CHOSEN_KEYS = ("indices", "block_indices", "topk_indices")

# Classes named attention that have no softmax over keys, or are only a part of an attention module.
_OTHER = re.compile(r"linear|lightning|delta|deformable|rwkv|pooling|mlp|output|layer$", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention module, with facts from its source code, attributes and config."""

    path: str
    module: nn.Module
    layer: int  # index in its stack
    text: bool  # part of a tower that reads or writes text
    num_heads: int | None
    head_dim: int | None

    @property
    def config(self) -> Any:
        """The config that selects the attention implementation; None if the module has none and is not routed."""
        return getattr(self.module, "config", None)

    @cached_property
    def kind(self) -> str | None:
        """Its entry in the config's `layer_types`, such as "sliding_attention", or None."""
        own = getattr(self.module, "layer_type", None)
        kinds = getattr(self.config, "layer_types", None)
        if own is None and isinstance(kinds, (list, tuple)) and self.layer < len(kinds):
            own = kinds[self.layer]
        return own if isinstance(own, str) else None

    @cached_property
    def routed(self) -> bool:
        """Whether it dispatches through transformers' `AttentionInterface`."""
        return _is_routed(self.module)

    @cached_property
    def cross(self) -> bool:
        named = _CROSS.search(f"{self.path} {type(self.module).__name__}")
        return bool(getattr(self.module, "is_cross_attention", False) or named)

    @cached_property
    def sparse(self) -> bool:
        """Whether an indexer selects the keys, or a compressor adds keys that the mask does not cover."""
        if getattr(self.module, "compressor", None) is not None:
            return True
        if all(passed_keyword(self.module, name) is None for name in CHOSEN_KEYS):
            return False
        shared = "prev_topk_indices" in read_forward(self.module).text  # chosen by an earlier layer's indexer
        return shared or getattr(self.module, "indexer", UNKNOWN) is not None

    @cached_property
    def window(self) -> int | None:
        """Size of the sliding window or chunk, or None."""
        if self.kind == "chunked_attention":
            return _first(self.config, ("attention_chunk_size",))
        if "sliding_window" in read_forward(self.module).keywords:
            window = passed_keyword(self.module, "sliding_window")
            return window if isinstance(window, int) else None
        if self.kind is None or "sliding" not in self.kind:
            return None
        return _first(self.module, ("sliding_window",)) or _first(self.config, ("sliding_window",))

    @cached_property
    def softcap(self) -> float | None:
        softcap = passed_keyword(self.module, "softcap")
        return softcap if isinstance(softcap, (int, float)) else None

    @cached_property
    def sinks(self) -> bool:
        return passed_keyword(self.module, "s_aux") is not None

    @cached_property
    def rope(self) -> bool:
        """Whether queries are rotated, from the source or, where it is not conclusive, from the config."""
        rotated = rotates_queries(self.module)
        if rotated is not None or self.cross:
            return bool(rotated)
        config = self.config
        bases = getattr(config, "layer_rope_theta", None)
        if bases is not None:
            return bool(bases[self.layer])
        parameters = getattr(config, "rope_parameters", None)
        if parameters is None or getattr(config, "position_embedding_type", "rope") != "rope":
            return False
        if self.kind in parameters:
            return parameters[self.kind] is not None
        return parameters.get("rope_theta", UNKNOWN) is not None

    @property
    def shape(self) -> dict[str, int]:
        """`num_heads` and `head_dim` for building a policy; 1 if unknown."""
        return {"num_heads": self.num_heads or 1, "head_dim": self.head_dim or 1}


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return every attention layer of a model in module order; those with `routed` can have a policy.

    A module is an attention layer if its `forward` calls the interface, or if its class name contains "attention" and
    it has a projection.
    """
    is_text = _text_test(transformers_model(model))
    found: dict[str, nn.Module] = {}
    configs: dict[str, Any] = {}
    for path, module in model.named_modules():
        configs[path] = getattr(module, "config", None) or configs.get(path.rpartition(".")[0])
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if _is_routed(module) or (_looks_like_attention(module) and not inside):
            found[path] = module
    # A module named attention that contains a routed one is only its container.
    routed = [path for path, module in found.items() if _is_routed(module)]
    outside = {path for path in found if path not in routed and any(inner.startswith(f"{path}.") for inner in routed)}
    found = {path: module for path, module in found.items() if path not in outside}
    numbers = _numbers(list(found))
    layers = []
    for path, module in found.items():
        index, text = getattr(module, "layer_idx", None), is_text(path, configs[path])
        layer = index if isinstance(index, int) and index >= 0 else numbers[path]
        layers.append(AttentionLayer(path, module, layer, text, *_shape(module, configs[path])))
    return layers


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a model that may be wrapped (PEFT, DDP)."""
    accepted = "a transformers model, or a wrapper of one"
    if not isinstance(model, nn.Module):
        reject_type("model", model, accepted)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    # Only the class name: the repr of a module grows with its size.
    raise ArgumentTypeError(
        f"model={type(model).__name__} is not accepted: expected {accepted}; for torch modules use attnscale.convert"
    )


def routed_layers(model: nn.Module) -> dict[str, AttentionLayer]:
    """Return the layers that can have a policy, keyed by path inside the transformers model, not its wrapper."""
    inner = transformers_model(model)
    outer = next(path for path, module in model.named_modules() if module is inner)
    prefix = f"{outer}." if outer else ""
    return {layer.path.removeprefix(prefix): layer for layer in find_attention_layers(model) if layer.routed}


def name_layers(layers: Sequence[AttentionLayer]) -> str:
    """Format layers for messages: the path of the first and the number of others."""
    return layers[0].path if len(layers) == 1 else f"{layers[0].path} (and {len(layers) - 1} more)"


def reject_model(model: nn.Module, reason: str, layers: Sequence[AttentionLayer] = ()) -> NoReturn:
    """Raise `ArgumentError` with the class of the model, the affected layers and the reason."""
    subject = f"{name_layers(layers)} " if layers else ""
    raise ArgumentError(f"model={type(transformers_model(model)).__name__} is not accepted: {subject}{reason}")


def _is_routed(module: nn.Module) -> bool:
    return read_forward(module).routed and hasattr(module, "config")


def _looks_like_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    if "attention" not in name.lower() or _OTHER.search(name) or isinstance(module, nn.MultiheadAttention):
        return False  # attnscale.convert handles nn.MultiheadAttention
    held = [getattr(child, "weight", None) for child in module.children() if not isinstance(child, nn.Embedding)]
    held += module.parameters(recurse=False)
    return any(isinstance(weight, Tensor) and weight.dim() > 1 for weight in held)


def _numbers(paths: list[str]) -> dict[str, int]:
    """Return the layer index of each path: the first number in it, or its rank where these are not distinct.

    The index of "encoder.block.3.layer.0.SelfAttention" is 3. Blocks of a hierarchical model are numbered by rank.
    """
    stacks: dict[str, list[str]] = {}
    for path in paths:
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        stacks.setdefault(pattern, []).append(path)
    numbers: dict[str, int] = {}
    for stack in stacks.values():
        first = [number for path in stack if (number := split_number(path)[1]) is not None]
        distinct = len(set(first)) == len(stack)
        numbers |= dict(zip(stack, first if distinct else range(len(stack)), strict=True))
    return numbers


def _text_test(model: PreTrainedModel) -> Callable[[str, object], bool]:
    """Return a predicate (path, config) → whether a module is part of a text tower, or of the only tower."""
    config, reads_text = model.config, model.main_input_name == "input_ids"
    parts = getattr(config, "sub_configs", None) or {}
    text = config.get_text_config() if parts else config
    if text is not config:
        encoder = getattr(config, "encoder", None)
        both = [text, encoder.get_text_config()] if reads_text and isinstance(encoder, PreTrainedConfig) else [text]
        return lambda path, own: type(own) in {type(part) for part in both}
    if reads_text:
        others = {type(getattr(config, name, None)) for name in parts if _NOT_TEXT.search(name)}
        return lambda path, own: type(own) not in others
    return lambda path, own: not (config.is_encoder_decoder and ".encoder." in f".{path}.")


def _shape(module: nn.Module, config: object) -> tuple[int | None, int | None]:
    """Return the number of heads and the head dimension, from the module, its query projection or its config."""
    heads, head_dim = _first(module, _HEADS) or _first(config, _HEADS), _first(module, _DIMS)
    width = _first(getattr(module, "q_proj", None), ("out_features",))
    if heads is None and head_dim and width:
        heads = width // head_dim
    if head_dim is None and heads:
        width = width or (_first(config, ("head_dim",)) or 0) * heads or _first(config, ("hidden_size",))
        head_dim = width // heads if width else None
    return heads, head_dim


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that is a positive int, or None."""
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


@dataclass(frozen=True)
class ForwardSource:
    """The source of a `forward`: keywords passed to the interface, and the conditions around each rotation."""

    text: str = ""
    routed: bool = False
    keywords: Mapping[str, ast.expr] = field(default_factory=dict)
    rotations: tuple[tuple[_Test, ...], ...] = ()


def read_forward(module: nn.Module) -> ForwardSource:
    """Parse the `forward` of a module's class; empty if there is no source."""
    return _read(type(module).forward)


@functools.cache
def _read(function: Callable[..., Any]) -> ForwardSource:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        body = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return ForwardSource()
    keywords: dict[str, ast.expr] = {}
    rotations: list[tuple[_Test, ...]] = []
    for call, tests in _calls(body, ()):
        name = str(getattr(call.func, "attr", None) or getattr(call.func, "id", ""))
        if name == _CALLED:
            keywords |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        elif "rotary" in name or "rope" in name or "rotate" in name:
            rotations.append(tests)
    return ForwardSource(text, _REGISTRY in text or f"{_CALLED}(" in text, keywords, tuple(rotations))


def passed_keyword(module: nn.Module, keyword: str) -> Any:
    """Return the value a module passes to the interface for a keyword; UNKNOWN if only a forward pass determines it."""
    given = read_forward(module).keywords.get(keyword)
    return None if given is None else _evaluate(given, module)


def rotates_queries(module: nn.Module) -> bool | None:
    """Whether a module rotates its queries; None if that depends on the arguments of its `forward`."""
    undecided = False
    for tests in read_forward(module).rotations:
        values = [(_evaluate(test, module), wanted) for test, wanted in tests]
        answers = [None if value is UNKNOWN else bool(value) is wanted for value, wanted in values]
        if all(answers):
            return True
        undecided = undecided or False not in answers
    return None if undecided else False


def _calls(node: ast.AST, tests: tuple[_Test, ...]) -> Iterator[tuple[ast.Call, tuple[_Test, ...]]]:
    """Yield every call with the conditions of the enclosing `if`s."""
    if isinstance(node, ast.Call):
        yield node, tests
    if isinstance(node, (ast.If, ast.IfExp)):
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            for statement in branch if isinstance(branch, list) else [branch]:
                yield from _calls(statement, (*tests, (node.test, wanted)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, tests)


def _evaluate(expression: ast.expr, module: nn.Module) -> Any:
    """Evaluate an expression that depends only on the module, else return UNKNOWN."""
    if any(isinstance(node, ast.Name) and node.id not in (*_EVALUABLE, "self") for node in ast.walk(expression)):
        return UNKNOWN
    code = compile(ast.Expression(body=expression), "<forward>", "eval")
    try:
        return eval(code, {"__builtins__": {}}, _EVALUABLE | {"self": module})
    except Exception:
        return UNKNOWN  # e.g. an attribute that this module lacks
