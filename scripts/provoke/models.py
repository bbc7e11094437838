"""Small models for the runs: a GPT that calls torch's attention, a Llama, an encoder–decoder, a GPT with ssmax."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnscale

VOCABULARY = 256  # bytes
LENGTH = 128


class Attention(nn.Module):
    """Causal self-attention with separate projections. With a policy it uses attnscale, otherwise torch's function."""

    def __init__(self, width: int, heads: int, policy: attnscale.Policy | None) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attention = None if policy is None else attnscale.ScaledDotProductAttention(policy)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.query, self.key, self.value))
        attend = F.scaled_dot_product_attention if self.attention is None else self.attention
        return self.merge(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer; the residual connections can be left out."""

    def __init__(self, width: int, heads: int, policy: attnscale.Policy | None, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.attn = Attention(width, heads, policy)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm(x)) + (x if self.residual else 0)
        return self.feed(x) + (x if self.residual else 0)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Embeddings, blocks and a linear head, initialised as GPT-2."""

    def __init__(
        self,
        policy: Callable[[], attnscale.Policy] | None = None,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, policy and policy(), residual) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(places)))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the next byte, for tokens [B, T + 1]."""
        return F.cross_entropy(self(tokens[:, :-1]).mT, tokens[:, 1:])


class EncoderDecoder(nn.Module):
    """torch's own Transformer: reads 64 bytes, writes the next 64."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.body = nn.Transformer(
            width, heads, layers, layers, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, VOCABULARY)
        attnscale.convert(self.body, "constant")

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the second half, for tokens [B, T + 1]."""
        half = LENGTH // 2
        x = self.token(tokens[:, :-1]) + self.place(torch.arange(LENGTH, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(half, device=tokens.device)
        out = self.head(self.body(x[:, :half], x[:, half:], tgt_mask=mask, tgt_is_causal=True))
        return F.cross_entropy(out.mT, tokens[:, half + 1 :])


class Llama(nn.Module):
    """A Llama of transformers with grouped heads and rotary embedding."""

    def __init__(self, **more: Any) -> None:
        import transformers

        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            **more,
        )
        make: Any = transformers.LlamaForCausalLM._from_config
        self.model = make(config, attn_implementation="sdpa")

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the next byte, for tokens [B, T + 1]."""
        return F.cross_entropy(self.model(tokens[:, :-1]).logits.mT, tokens[:, 1:])


class Embedded(nn.Module):
    """The trained model in the package, fine-tuned on another text."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        folder = str(files("attnscale.lab").joinpath("embedded"))
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, attn_implementation="sdpa").train()

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the next byte, for tokens [B, T + 1]."""
        return F.cross_entropy(self.model(tokens[:, :-1]).logits.mT, tokens[:, 1:])


HEALTHY: dict[str, Callable[[], Any]] = {
    "gpt": Gpt,
    "llama": Llama,
    "encoder_decoder": EncoderDecoder,
    "ssmax": lambda: Gpt(lambda: attnscale.build_policy("ssmax", num_heads=4, reference_length=LENGTH)),
}
