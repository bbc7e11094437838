"""`attnscale.convert` changes the temperature of a torch model, nothing else, and takes it back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnscale
from attnscale.errors import ArgumentError

E, H, T = 16, 4, 12
# Padded on the right, as torch's nested-tensor path wants it; the longest sequence is full.
PADDING = torch.arange(T) >= torch.tensor([12, 7, 3])[:, None]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoder(layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not options.get("norm_first", False))
    return randomised(model)


def decoder() -> nn.TransformerDecoder:
    torch.manual_seed(0)
    return randomised(nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True), 2))


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return randomised(nn.Transformer(E, H, 1, 1, 32, dropout=0.0, batch_first=True))


def bare() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return randomised(nn.MultiheadAttention(E, H, batch_first=True))


class Twice(nn.Module):
    """One attention in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = randomised(nn.MultiheadAttention(E, H, batch_first=True))
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        for attention in (self.first, self.second):
            x = x + attention(x, x, x, need_weights=False)[0]
        return x


def randomised(model: Any) -> Any:
    """Scores of ordinary size: with torch's initial weights attention is too flat for a temperature to matter."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=E**-0.5)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], int]] = {
    "encoder": (encoder, lambda model: model(tokens(3, T, E)), 2),
    "padded encoder": (encoder, lambda model: real_rows(model(tokens(3, T, E), src_key_padding_mask=PADDING)), 2),
    "causal encoder": (
        encoder,
        lambda model: model(tokens(3, T, E), mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True),
        2,
    ),
    "norm-first encoder": (lambda: encoder(norm_first=True), lambda model: model(tokens(3, T, E)), 2),
    "decoder": (decoder, lambda model: model(tokens(3, 5, E), tokens(3, T, E, seed=2)), 4),
    "causal decoder": (
        decoder,
        lambda model: model(
            tokens(3, 5, E),
            tokens(3, T, E, seed=2),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
            tgt_is_causal=True,
            memory_key_padding_mask=PADDING,
        ),
        4,
    ),
    "transformer": (transformer, lambda model: model(tokens(3, T, E), tokens(3, 5, E, seed=2)), 3),
    "bare attention": (bare, lambda model: model(*[tokens(3, T, E)] * 3)[0], 1),
    "shared attention": (Twice, lambda model: model(tokens(3, T, E)), 1),
}
every_model = pytest.mark.parametrize("name", MODELS)


def real_rows(output: Tensor) -> Tensor:
    """What is not padding: torch's nested path writes zeros into padded rows, its other path does not."""
    return output[~PADDING]


def evaluated(name: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return MODELS[name][1](model.eval())


def attentions(model: nn.Module) -> list[nn.MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


def snapshot(model: nn.Module) -> list[tuple[str, type, dict[str, Any]]]:
    """Every module with its class and attributes, so that anything added, lost or changed shows."""
    kept = (bool, int, float, str, type(None))
    return [
        (name, type(module), {key: value if isinstance(value, kept) else id(value) for key, value in entries(module)})
        for name, module in model.named_modules()
    ]


def entries(module: nn.Module) -> list[tuple[str, Any]]:
    plain = [(key, value) for key, value in vars(module).items() if not isinstance(value, dict)]
    return [*plain, *module._parameters.items(), *module._buffers.items(), *module._modules.items()]


@every_model
def test_standard_attention_changes_nothing(name: str) -> None:
    model = MODELS[name][0]()
    stock = evaluated(name, model)
    conversion = attnscale.convert(model, "constant")
    assert len(conversion.policies) == MODELS[name][2]
    assert all(type(module) is attnscale.MultiheadAttention for module in attentions(model))
    torch.testing.assert_close(evaluated(name, model), stock, rtol=1e-4, atol=1e-5)


@every_model
@pytest.mark.parametrize("policy", ["constant", "log", "ssmax"])
def test_removing_gives_back_the_same_model_to_the_bit(name: str, policy: str) -> None:
    model = MODELS[name][0]()
    stock, before, keys = evaluated(name, model), snapshot(model), list(model.state_dict())
    conversion = attnscale.convert(model, policy)
    assert snapshot(model) != before
    evaluated(name, model)
    conversion.remove()
    assert snapshot(model) == before
    assert list(model.state_dict()) == keys
    assert all(type(module) is nn.MultiheadAttention for module in attentions(model))
    assert torch.equal(evaluated(name, model), stock)


@every_model
@pytest.mark.parametrize("policy", ["log", {"name": "constant", "beta": 3.0}], ids=["log", "constant"])
def test_no_fused_path_of_torch_bypasses_the_policy(name: str, policy: Any) -> None:
    model = MODELS[name][0]()
    stock = evaluated(name, model)
    attnscale.convert(model, policy)
    produced = evaluated(name, model)
    torch.testing.assert_close(produced, MODELS[name][1](model.train()), rtol=1e-4, atol=1e-5)
    assert (produced - stock).abs().max() > 0.1


def test_the_padded_encoder_really_meets_the_nested_path_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Guards the tests above: they would prove nothing if stock torch did not take that path here.
    seen = []
    forward = nn.TransformerEncoderLayer.forward
    monkeypatch.setattr(
        nn.TransformerEncoderLayer,
        "forward",
        lambda self, src, *a, **k: seen.append(src.is_nested) or forward(self, src, *a, **k),
    )
    model = encoder()
    evaluated("padded encoder", model)
    assert seen == [True, True]
    seen.clear()
    with attnscale.convert(model, "log"):
        evaluated("padded encoder", model)
    assert seen == [False, False]


def test_padding_does_not_change_the_temperature_of_what_is_real() -> None:
    model = encoder()
    attnscale.convert(model, "log")
    model.eval()
    x = tokens(3, T, E)
    with torch.no_grad():
        padded = model(x, src_key_padding_mask=PADDING)
        for row, length in enumerate((~PADDING).sum(-1).tolist()):
            alone = model(x[row : row + 1, :length])
            torch.testing.assert_close(padded[row : row + 1, :length], alone, rtol=1e-4, atol=1e-5)


def test_hooks_survive() -> None:
    model, calls = encoder(), []
    attention = model.layers[0].self_attn
    attention.register_forward_hook(lambda module, *_: calls.append(type(module)))
    conversion = attnscale.convert(model, "log")
    evaluated("encoder", model)
    conversion.remove()
    evaluated("encoder", model)
    assert calls == [attnscale.MultiheadAttention, nn.MultiheadAttention]


def test_references_and_parameters_are_the_same_objects() -> None:
    model = encoder()
    modules, parameters = attentions(model), dict(model.named_parameters())
    with attnscale.convert(model, "ssmax"):
        assert all(a is b for a, b in zip(attentions(model), modules, strict=True))
        assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(a is b for a, b in zip(attentions(model), modules, strict=True))
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())


def test_an_optimizer_built_before_goes_on_training_the_model() -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.layers[0].self_attn.in_proj_weight
    for policy in ("log", None):
        before = weight.detach().clone()
        conversion = None if policy is None else attnscale.convert(model, policy)
        model.train()(tokens(3, T, E)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(weight, before)
        if conversion is not None:
            conversion.remove()
    assert model.layers[0].self_attn.in_proj_weight is weight


def test_removing_twice_is_removing_once() -> None:
    model = encoder()
    before = snapshot(model)
    first = attnscale.convert(model, "log")
    first.remove()
    first.remove()
    assert snapshot(model) == before
    with attnscale.convert(model, "log"):
        first.remove()
        assert all(type(module) is attnscale.MultiheadAttention for module in attentions(model))


def test_the_context_manager_restores_the_model_when_its_body_raises() -> None:
    model = encoder()
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="query of shape"), attnscale.convert(model, "log"):
        model(torch.zeros(3, T, E + 1))
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("policy", "parameters", "message"),
    [
        ("lgo", {}, "Did you mean 'log'"),
        ("power", {}, "needs exponent"),
        ({"gamma": 2.0}, {}, "expected the key 'name'"),
        ("log", {"gamma": -1.0}, "gamma=-1.0"),
        ("log", {"colour": "red"}, "parameter 'colour'"),
        ("nowhere.yaml", {}, "nowhere.yaml"),
        (nn.Identity(), {}, "policy"),
        (None, {}, "policy=None"),
    ],
    ids=str,
)
def test_a_bad_policy_leaves_the_model_untouched(policy: Any, parameters: dict[str, Any], message: str) -> None:
    model = encoder()
    before = snapshot(model)
    with pytest.raises(attnscale.AttnScaleError, match=message):
        attnscale.convert(model, policy, **parameters)
    assert snapshot(model) == before


def test_a_policy_that_suits_only_some_modules_changes_none() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(2, 2)])
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="head_dim=1"):
        attnscale.convert(model, "sphere")
    assert snapshot(model) == before


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"model=Sequential is not accepted: .* torch\.nn\.MultiheadAttention$"):
        attnscale.convert(nn.Sequential(nn.Linear(2, 2)), "log")


def test_a_converted_model_is_refused_and_stays_converted() -> None:
    model = encoder()
    attnscale.convert(model, "log")
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="already converted"):
        attnscale.convert(model, "sqrt_log")
    assert snapshot(model) == before


def test_attention_that_is_ours_or_a_subclass_is_left_alone() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict(
        {
            "stock": nn.MultiheadAttention(8, 2),
            "ours": attnscale.MultiheadAttention(8, 2, policy="qwen"),
            "own": Own(8, 2),
        }
    )
    before = snapshot(model)
    conversion = attnscale.convert(model, "log")
    assert list(conversion.policies) == ["stock"]
    assert model["ours"].policy.name == "qwen"
    assert type(model["own"]) is Own
    conversion.remove()
    assert snapshot(model) == before


def test_each_module_has_a_policy_of_its_own_with_its_number_of_heads() -> None:
    model = nn.ModuleDict({"narrow": nn.MultiheadAttention(8, 2), "wide": nn.MultiheadAttention(24, 6)})
    conversion = attnscale.convert(model, "ssmax", reference_length=64)
    assert {name: policy.num_heads for name, policy in conversion.policies.items()} == {"narrow": 2, "wide": 6}
    assert {name: policy.reference_length for name, policy in conversion.policies.items()} == {"narrow": 64, "wide": 64}
    assert all(model[name].policy is policy for name, policy in conversion.policies.items())


def test_a_finished_policy_is_copied_for_each_module() -> None:
    policy = attnscale.build_policy("ssmax", num_heads=H)
    conversion = attnscale.convert(encoder(layers=3), policy)
    own = [policy, *conversion.policies.values()]
    assert len({id(p) for p in own}) == len({id(p.s) for p in own}) == 4


def test_the_paths_of_the_policies_are_those_of_the_modules() -> None:
    model = transformer()
    conversion = attnscale.convert(model, "log")
    assert set(conversion.policies) == {
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    }
    assert all(model.get_submodule(name).policy is policy for name, policy in conversion.policies.items())


def through_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_model
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle], ids=["deepcopy", "torch.save"])
def test_a_copy_of_a_converted_model_is_converted_and_independent(
    name: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = MODELS[name][0]()
    conversion = attnscale.convert(model, "ssmax", reference_length=8)
    expected = evaluated(name, model)
    twin = copied(model)
    assert torch.equal(evaluated(name, twin), expected)
    conversion.remove()
    assert torch.equal(evaluated(name, twin), expected)


def test_the_state_of_a_converted_model_loads_into_another_one() -> None:
    first, second = encoder(), encoder()
    for model in (first, second):
        attnscale.convert(model, "ssmax")
    for module in attentions(first):
        nn.init.constant_(module.policy.s, 0.7)
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(evaluated("encoder", second), evaluated("encoder", first))


def test_training_a_converted_model_trains_its_policies() -> None:
    model = encoder()
    conversion = attnscale.convert(model, "ssmax", reference_length=T)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = {name: policy.s.detach().clone() for name, policy in conversion.policies.items()}
    x, target, losses = tokens(3, T, E), tokens(3, T, E, seed=9), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model.train()(x, src_key_padding_mask=PADDING)[~PADDING], target[~PADDING])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, policy in conversion.policies.items():
        assert (policy.s != before[name]).all()


def test_a_converted_encoder_compiles_without_a_graph_break() -> None:
    torch.compiler.reset()
    model = encoder(layers=1).train()
    attnscale.convert(model, "log")
    x = tokens(3, T, E)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
