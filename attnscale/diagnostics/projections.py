"""Query and key projections of an attention layer: which rows of which parameters belong to which head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.nn.utils import parametrize

from attnscale.errors import ArgumentError
from attnscale.module import MultiheadAttention, ScaledDotProductAttention

BY_HAND = (
    "Supported are separate projections (q_proj and k_proj, query and key, wq and wk, …), c_attn of GPT-2 and nanoGPT, "
    "query_key_value of GPT-NeoX, qkv_proj of Phi-3, latent attention of DeepSeek, and MultiheadAttention. For others, "
    "pass the projections: QKClip(model, projections={path: (q_proj, k_proj)}), {path: qkv} if the rows of one "
    "projection are those of q, k and v in turn, {path: (qkv, 'by_head')} if they alternate by head, or {path: None} "
    "to leave a layer out"
)
SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("query_proj", "key_proj"),
    ("to_q", "to_k"),
    ("wq", "wk"),
    ("q", "k"),
)
# Children that do not act on the logits: projections of values and outputs.
OTHERS = {
    "v_proj", "value", "v_lin", "value_proj", "to_v", "wv", "v", "o_proj", "out_proj", "out_lin", "to_out", "wo", "o",
    "c_proj", "dense", "proj", "out",
}  # fmt: skip
LATENT = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}
# Parameters of the attention module itself that do not act on q·k.
OWN = {"sinks"}


class HeadRows(NamedTuple):
    """Output rows of a parameter that belong to heads: `size` rows of each of `heads` heads, `stride` rows apart."""

    module: nn.Module
    name: str  # of the parameter
    axis: int  # of its outputs
    start: int
    stride: int
    size: int
    heads: int
    role: str  # "query", "key", or "rotary" for query rows that meet a key shared by all heads

    @property
    def parameter(self) -> Tensor | None:
        """The parameter; None without a bias. Looked up anew: `fully_shard` exchanges parameters."""
        found: Tensor | None = getattr(self.module, self.name, None)
        return found

    def of_head(self) -> list[range]:
        """The rows of each head."""
        starts = (self.start + head * self.stride for head in range(self.heads))
        return [range(start, start + self.size) for start in starts]


class HeadShape(NamedTuple):
    """Query heads of a layer over all processes, and their dimension."""

    heads: int
    dim: int


Layout = Callable[[HeadShape], list[HeadRows]]


def find_layout(path: str, attention: nn.Module, holder: nn.Module | None, given: object = ...) -> Layout | None:
    """The layout of the projections of an attention module.

    Args:
        path: of the layer, for messages.
        attention: the attnscale module.
        holder: the module with the projections; None if unknown.
        given: projections passed by the user; None excludes the layer.

    Raises:
        ArgumentError: the layout is unknown, or scaling the projections would not scale the logits.
    """
    if given is None:
        return None
    if given is not ...:
        return _given_layout(path, given)
    if isinstance(attention, nn.MultiheadAttention):
        return _multihead_layout(attention)
    if holder is None:
        _refuse(path, attention, "no module around it has the projections")
    children = dict(holder.named_children())
    norms = sorted(name for name in children.keys() - LATENT if "norm" in name.lower())
    if norms:
        reason = f"it normalises ({', '.join(norms)}), and a norm of queries or keys undoes the scale of a projection"
        _refuse(path, holder, reason)
    ours = ScaledDotProductAttention, MultiheadAttention
    children = {
        name: child
        for name, child in children.items()
        if not isinstance(child, ours) and any(True for _ in child.parameters())
    }
    layout, known = _named_layout(path, holder, children)
    others = children.keys() - known - OTHERS
    others |= {name for name, _ in holder.named_parameters(recurse=False)} - OWN
    if others:
        names = ", ".join(sorted(others))
        _refuse(path, holder, f"it has other parameters ({names}), which may scale the logits after the projections")
    return layout


def _named_layout(path: str, holder: nn.Module, children: dict[str, nn.Module]) -> tuple[Layout, set[str]]:
    """The layout that the names of children tell, and the names that belong to it."""
    kind = type(holder).__name__
    if "kv_b_proj" in children:
        return _latent_layout(path, holder, children), LATENT
    for query, key in SEPARATE:
        if query in children and key in children:
            return _separate(path, children[query], children[key]), {query, key}
    if "c_attn" in children:
        by_head = kind.startswith("GPTBigCode") and not getattr(holder, "multi_query", True)
        return (_by_head if by_head else _split)(path, children["c_attn"]), {"c_attn"}
    if "query_key_value" in children and kind.startswith("GPTNeoX"):
        return _by_head(path, children["query_key_value"]), {"query_key_value"}
    if "qkv_proj" in children and kind.startswith(("Phi3", "Phi4")):
        return _split(path, children["qkv_proj"]), {"qkv_proj"}
    _refuse(path, holder, f"its projections are unknown (modules with parameters: {', '.join(children) or 'none'})")


def _given_layout(path: str, given: object) -> Layout:
    if isinstance(given, nn.Module):
        return _split(path, given)
    if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], nn.Module):
        first, second = given
        if isinstance(second, nn.Module):
            return _separate(path, first, second)
        if second == "by_head":
            return _by_head(path, first)
    raise ArgumentError(f"projections[{path!r}]={given!r} is not accepted. {BY_HAND}")


def _separate(path: str, query: nn.Module, key: nn.Module) -> Layout:
    axes = [(module, _axes(path, module)) for module in (query, key)]

    def rows(shape: HeadShape) -> list[HeadRows]:
        keys = _outputs(key) // shape.dim
        _check_rows(path, query, shape, shape.heads * shape.dim)
        _check_rows(path, key, shape, keys * shape.dim, fits=keys > 0 and shape.heads % max(keys, 1) == 0)
        heads = (shape.heads, keys)
        return [
            HeadRows(module, *axis, 0, shape.dim, shape.dim, number, role)
            for (module, of_module), number, role in zip(axes, heads, ("query", "key"), strict=True)
            for axis in of_module
        ]

    return rows


def _split(path: str, module: nn.Module) -> Layout:
    """The rows of all queries, of all keys and of all values, in turn."""
    axes = _axes(path, module)

    def rows(shape: HeadShape) -> list[HeadRows]:
        heads, dim = shape
        keys = (_outputs(module) // dim - heads) // 2
        _check_rows(path, module, shape, (heads + 2 * keys) * dim, fits=keys > 0 and heads % max(keys, 1) == 0)
        places = (0, heads, "query"), (heads * dim, keys, "key")
        return [HeadRows(module, *axis, at, dim, dim, number, role) for axis in axes for at, number, role in places]

    return rows


def _by_head(path: str, module: nn.Module) -> Layout:
    """The rows of query, key and value of the first head, of the second head, and so on."""
    axes = _axes(path, module)

    def rows(shape: HeadShape) -> list[HeadRows]:
        heads, dim = shape
        _check_rows(path, module, shape, 3 * heads * dim)
        places = (0, "query"), (dim, "key")
        return [HeadRows(module, *axis, at, 3 * dim, dim, heads, role) for axis in axes for at, role in places]

    return rows


def _latent_layout(path: str, holder: Any, children: dict[str, nn.Module]) -> Layout:
    """DeepSeek: each head has its own keys without positions; a rotary key is shared by all heads."""
    name = "q_b_proj" if "q_b_proj" in children else "q_proj"
    if name not in children:
        _refuse(path, holder, "it has neither q_b_proj nor q_proj")
    query, key = children[name], children["kv_b_proj"]
    of_query, of_key = _axes(path, query), _axes(path, key)
    try:
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        plain, rotary, values = (int(getattr(holder, size, None) or getattr(holder.config, size)) for size in sizes)
    except AttributeError as error:
        _refuse(path, holder, f"it lacks the sizes of latent attention ({error})")

    def rows(shape: HeadShape) -> list[HeadRows]:
        heads, whole = shape.heads, plain + rotary
        _check_rows(path, query, shape, heads * whole)
        _check_rows(path, key, shape, heads * (plain + values))
        found = [HeadRows(query, *axis, 0, whole, plain, heads, "query") for axis in of_query]
        found += [HeadRows(query, *axis, plain, whole, rotary, heads, "rotary") for axis in of_query]
        return found + [HeadRows(key, *axis, 0, plain + values, plain, heads, "key") for axis in of_key]

    return rows


def _multihead_layout(module: nn.MultiheadAttention) -> Layout:
    def rows(shape: HeadShape) -> list[HeadRows]:
        heads, dim = shape
        packed, after = module.in_proj_weight is not None, module.embed_dim
        places = [
            ("in_proj_weight" if packed else "q_proj_weight", 0, 0, "query"),
            ("in_proj_weight" if packed else "k_proj_weight", 0, after if packed else 0, "key"),
            ("in_proj_bias", 0, 0, "query"),
            ("in_proj_bias", 0, after, "key"),
            ("bias_k", 2, 0, "key"),
        ]
        return [HeadRows(module, name, axis, start, dim, dim, heads, role) for name, axis, start, role in places]

    return rows


def _axes(path: str, module: nn.Module) -> list[tuple[str, int]]:
    """The parameters of a projection with the axis of its outputs."""
    transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # of transformers: weight [in, out]
    if not (isinstance(module, nn.Linear) or transposed):
        _refuse(path, module, "a projection must be a torch.nn.Linear or a Conv1D of transformers")
    weight = module.weight
    if parametrize.is_parametrized(module) or not isinstance(weight, Tensor) or not weight.is_floating_point():
        _refuse(path, module, "its weight is parametrized or quantized")
    return [("weight", 1 if transposed else 0), ("bias", 0)]


def _outputs(module: nn.Module) -> int:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.shape[0 if isinstance(module, nn.Linear) else 1]


def _check_rows(path: str, module: nn.Module, shape: HeadShape, expected: int, *, fits: bool = True) -> None:
    if not fits or _outputs(module) != expected:
        heads, dim = shape
        _refuse(path, module, f"its {_outputs(module)} outputs do not fit {heads} query heads of dimension {dim}")


def _refuse(path: str, module: nn.Module, reason: str) -> NoReturn:
    raise ArgumentError(f"{path} ({type(module).__name__}) is not accepted by QKClip: {reason}. {BY_HAND}")


def holders(model: nn.Module, attention: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield path, attention module and the module with its projections, for attention modules by path.

    The path of a site in a transformers model is that of the model's own attention module, which has the projections.
    Any other attnscale module is a child of the module with the projections.
    """
    modules = dict(model.named_modules())
    for path, module in attention.items():
        holder = modules.get(path)
        if holder is module:
            parent = path.rpartition(".")[0]
            holder = modules.get(parent)
        yield path, module, holder


def role_factors(factors: Tensor, keys: int, alpha: float) -> dict[str, Tensor]:
    """Factors of the rows by role, for factors γ [H] of the logits and a number of key heads.

    A key head serves a group of query heads. Its factor κ is that of the head of the group that is clipped least, so a
    head with γ = 1 is not changed by the others; the queries have γ / κ.
    """
    by_group = factors.view(keys, -1)
    key = by_group.amax(1) ** (1 - alpha)
    return {"query": (by_group / key[:, None]).flatten(), "key": key, "rotary": factors}


def parameter_factors(rows: Sequence[HeadRows], factors: Tensor, alpha: float) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield each parameter, the axis of its outputs, and a factor per output, for factors γ [H] of the logits."""
    keys = next((part.heads for part in rows if part.role == "key"), len(factors))
    by_role = role_factors(factors, keys, alpha)
    found: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
    for part in rows:
        parameter = part.parameter
        if parameter is None:
            continue
        place = id(part.module), part.name
        if place not in found:
            found[place] = parameter, part.axis, factors.new_ones(parameter.shape[part.axis])
        for of_head, factor in zip(part.of_head(), by_role[part.role], strict=True):
            found[place][2][of_head.start : of_head.stop] = factor
    yield from found.values()
