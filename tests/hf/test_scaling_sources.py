"""The sources of the installed transformers: every factor on queries and keys is known, laws of length detected.

A release that multiplies queries, keys or the softmax scale by something new fails here. Decide whether the factor
depends on the length or the position. If it does, detect it in `attnscale/hf/existing.py`, add a case to
`test_existing.py`, and add it to LAWS; else add it to OTHERS.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from hf_releases import since
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import attnscale.hf
from attnscale.hf.attention_layers import find_attention_layers
from attnscale.hf.existing import find_existing

MODELS = Path(transformers.__file__).parent / "models"

# Expression → the model types that have it, some of them since a later release than 5.22. Each depends on the length or
# the position.
LAWS = {
    "attention_scaling": {"beam"},
    "torch.log1p((position_ids.float() + 1) / 2048)": {"beam"},
    "attn_scales": {"llama4"},
    "torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale))": {"llama4"},
    "get_llama_4_attn_scale(...)": {"ministral3", "mistral4"},
    "torch.log(1 + torch.floor(positions_ids / max_position_embeddings))": {"ministral3", "mistral4"},
    "scale.unsqueeze(-1)": {"mistral_large4"},
    "(position_ids + 1).float().log()": {"mistral_large4"},
    "tau": {"inkling", "inkling2"},
    "torch.log(...)": {"inkling2"},
    "yarn_apply_mscale(...)": {
        "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
        "hy_v4", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "youtu",
    },
}  # fmt: skip

# Types that have their law only with these settings, and the names of text models.
SETTINGS = {
    "llama4": {"model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0]},
    "mistral_large4": {"model_type": "mistral_large4_text"},
    "inkling": {"model_type": "inkling_text", "log_scaling_n_floor": 4, "layer_types": ["hybrid"] * 4},
    "inkling2": {"model_type": "inkling2_text", "layer_types": ["hybrid"] * 4},
    "bailing_hybrid": {"num_hidden_layers": 8},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LATENT = {"max_position_embeddings": 512, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}

OTHERS = {
    "F.one_hot(kernel_idxs.long(), length).float()": "pooling of patches",
    "config.hidden_size": "size of a projection",
    "d_model": "initial values",
    "errors": "loss of a forecast",
    "hidden_size": "initial values",
    "int((image_position_ids.shape[1] // output_length) ** 0.5) ** 2": "pooling of patches",
    "key_context_size + 1": "size of a buffer",
    "kv_attn_mask[:, None, None, :]": "mask",
    "length": "pooling of patches",
    "math.log1p(int(key_states_time_length))": "number of sampled keys",
    "math.log1p(int(query_states_time_length))": "number of sampled queries",
    "module.position_embedding.shape[-1] ** (-0.5)": "initial values",
    "n_heads": "initial values",
    "num_query_blocks": "size of a buffer",
    "num_tokens ** (-0.5)": "attention between channels, where the tokens are the contracted dimension",
    "num_windows": "size of a buffer",
    "pos_transformation": "position embedding of boxes",
    "r_softplus_0": "constant",
    "scale[None, None, None, :]": "learned per channel",
    "self.head_dim_scale / key_states.norm(...)": "normalised keys",
    "self.head_dim_scale / query_states.norm(...)": "normalised queries",
    "sequence_length ** 0.5": "size of an image",
    "torch.linalg.norm(query_embeds, dim=-1, keepdim=True) + 1e-06": "contrastive loss",
}

# Older releases write the same factors in other words; the tests of detection below run with all releases.
of_listed_releases = since("5.22", "the factors are those listed here")

QUERY_OR_KEY = re.compile(r"q|query|queries|k|key|keys|(q|query|k|key)_\w+")
POSITION = re.compile(r"position|seq_?len|kv_len|cache_len|num_tokens|length")
LOGARITHMS = ("log", "log2", "log1p", "log10", "pow", "float_power")
# Top-level classes and functions without their decorators, and lines without which a block has no factor.
BETWEEN_BLOCKS = re.compile(r"^(?:@(?:.*\n)*?)?(?=(?:class|def) )", re.M)
WORTH_PARSING = re.compile(
    r"\b(?:q|k|query|key)\w*\b.*[*/]|[*/]=? *\(?(?:q|k|query|key)|^ +[*/]|\blog|\*\*|pow\(|self\.\w*scal\w* = \w+\(",
    re.M,
)
SOFTMAX_SCALES = ("scaling", "scale", "softmax_scale")


def root(node: ast.AST) -> str:
    """The name that an expression starts with: `query` of `query.float()[0]`, `q_proj` of `self.q_proj(x)`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def is_attribute(node: ast.AST) -> bool:
    """Whether an expression has only attributes of the module and numbers, set when the module was built."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return names <= {"self", "math"} and all(root(call.func) == "math" for call in calls)


def factors(node: ast.AST) -> Iterator[ast.AST]:
    """What a product multiplies a query or key with, or divides it by."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Mult, ast.Div)):
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        for one, other in ((left, right), (right, left)):
            if QUERY_OR_KEY.fullmatch(root(one)) and not QUERY_OR_KEY.fullmatch(root(other)):
                yield other


def growth(node: ast.AST) -> Iterator[ast.AST]:
    """A logarithm or power of a position or length."""
    is_logarithm = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGARITHMS
    if is_logarithm or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        base = node.left if isinstance(node, ast.BinOp) else node
        if POSITION.search(ast.unparse(base)):
            yield node


def scales(node: ast.AST) -> Iterator[ast.AST]:
    """A softmax scale that a function computes."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and isinstance(node.value, ast.Call):
        function = node.value.func
        if node.targets[0].attr in SOFTMAX_SCALES and isinstance(function, ast.Name) and function.id != "float":
            yield node.value


def written(node: ast.AST) -> str:
    """An expression as text, without the arguments of long calls and of functions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return f"{node.func.id}(...)"
    text = ast.unparse(node)
    return text if len(text) <= 72 else re.sub(r"\(.*\)(\.\w+\(.*\))?$", "(...)", text, flags=re.S)


def read_factors(text: str) -> Iterator[str]:
    """The factors in the source of a modeling file, apart from those of rotary embeddings and position buckets."""
    for block in filter(WORTH_PARSING.search, BETWEEN_BLOCKS.split(text)):
        is_class = block.startswith("class ")
        rest: list[tuple[ast.AST, str]] = [(ast.parse(block), "")]
        while rest:
            node, function = rest.pop()
            if isinstance(node, ast.FunctionDef):
                function = node.name
                if re.search(r"rot|rope|bucket", function):
                    continue
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name) and node.func.id in ("int", "torch_int"):
                    continue  # the square root of a number of patches is made an int
                yield from map(written, growth(node))
            elif isinstance(node, (ast.BinOp, ast.AugAssign)):
                yield from map(written, growth(node))
                if is_class:
                    yield from (written(factor) for factor in factors(node) if not is_attribute(factor))
            elif isinstance(node, ast.Assign) and function == "__init__":
                yield from map(written, scales(node))
            if not isinstance(node, (ast.Name, ast.Constant)):
                rest += [(child, function) for child in ast.iter_child_nodes(node)]


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """Expression → model types, of all types whose attention is routed through the interface."""
    collected: dict[str, set[str]] = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "ALL_ATTENTION_FUNCTIONS" in text:
            for expression in read_factors(text):
                collected.setdefault(expression, set()).add(file.parent.name)
    return collected


def test_a_new_law_would_be_found():
    source = """
@decorated(
    by="this"
)
class NewAttention(nn.Module):
    def __init__(self, config):
        self.scaling = stretched(config.head_dim)

    def forward(self, query_states, position_ids):
        query_states = (query_states * factor_of(position_ids)).to(torch.bfloat16)
        query_states *= self.scaling

def factor_of(position_ids):
    return position_ids.float() ** 0.25
"""
    assert set(read_factors(source)) == {"stretched(...)", "factor_of(...)", "position_ids.float() ** 0.25"}


@of_listed_releases
def test_every_factor_on_queries_and_keys_is_known(found):
    unknown = {expression: sorted(types) for expression, types in found.items() if expression not in LAWS | OTHERS}
    assert not unknown, f"transformers {transformers.__version__} has new factors; see the docstring of this file"


@of_listed_releases
def test_every_type_with_a_law_of_length_is_known(found):
    present = {file.parent.name for file in MODELS.glob("*/modeling_*.py")}
    assert {expression: found.get(expression, set()) for expression in LAWS} == {
        expression: types & present for expression, types in LAWS.items()
    }


@of_listed_releases
def test_no_factor_is_listed_that_does_not_exist(found):
    assert set(OTHERS) <= set(found)


# A rotary embedding multiplies cos and sin by a factor: these types have none, or one that `existing.py` reads.
def test_no_rotary_embedding_is_new():
    assert set(ROPE_INIT_FUNCTIONS) <= {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}


def test_the_factor_of_every_rotary_embedding_has_one_name():
    factors = set()
    for file in MODELS.glob("*/modeling_*.py"):
        factors |= set(re.findall(r"\.cos\(\) \* (\w[\w.]*)", file.read_text(encoding="utf-8")))
    assert factors == {"self.attention_scaling", "attention_scaling", "mscale"}


@pytest.mark.parametrize("folder", sorted(set().union(*LAWS.values())))
def test_the_law_of_every_such_type_is_named_and_not_applied_twice(folder):
    settings = {"model_type": folder, "num_hidden_layers": 4} | SETTINGS.get(folder, {})
    if settings["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {folder}")
    if folder in LAWS["yarn_apply_mscale(...)"]:
        settings = LATENT | settings
        if "mscale" not in (MODELS / folder / f"modeling_{folder}.py").read_text(encoding="utf-8"):
            pytest.skip(f"{folder} does not scale in transformers {transformers.__version__}")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**settings))
    named = {layer.path: [law.name for law in find_existing(model, layer)] for layer in find_attention_layers(model)}
    assert any(named.values())
    if folder in LAWS["yarn_apply_mscale(...)"]:
        assert all("DeepSeek mscale" in laws for laws in named.values())
    inspection = attnscale.hf.inspect(model, "log", reference_length=64)
    assert not inspection.accepted
    for layer in inspection.layers:
        assert [description.split(":")[0] for description in layer.existing] == named[layer.facts.path]
        assert not layer.existing or layer.verdict == "refused"
