"""Drop-in modules: `ScaledDotProductAttention` and `MultiheadAttention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from attnscale._util.checks import check_dense, check_floating, is_floating, read_int
from attnscale._util.tracing import is_dtensor
from attnscale.attention import AttentionRules, attention_and_weights, attention_through
from attnscale.call.tap import Tap
from attnscale.call.torch_arguments import is_causal_bias, nest_like, pad_nested
from attnscale.errors import ArgumentTypeError, BackendError, ModuleArgumentError, ModuleDtypeError, reject, reject_type
from attnscale.policies import Policy, PolicySpec, build_policy, build_policy_for
from attnscale.policies.settle import settle

SpreadAttention = Callable[..., Tensor]  # (tap, *arguments of `scaled_dot_product_attention`)


class ScaledDotProductAttention(nn.Module):
    """`scaled_dot_product_attention` as a module. The module owns the policy and its parameters.

    Args:
        policy: a name, a mapping, a YAML file or a policy object.
        **parameters: policy parameters, such as `reference_length`.

    Raises:
        ArgumentError: the policy or one of its parameters is not accepted.

    Example:
        >>> attention = ScaledDotProductAttention("log", reference_length=2048)
        >>> q = torch.randn(1, 2, 16, 8)
        >>> attention(q, q, q, is_causal=True).shape
        torch.Size([1, 2, 16, 8])
    """

    policy: Policy
    tap: Tap | None = None
    # Cross-attention. If False, equal numbers of queries and keys count as the same tokens. Read by monitors only: a
    # padded key then implies a padded row.
    cross: bool = False
    # Set by `attnscale.distributed`: the attention function of a sequence sharded over processes, and this process's
    # share of the heads (part index, number of parts).
    spread: SpreadAttention | None = None
    head_part: tuple[int, int] = (0, 1)

    def __init__(self, policy: PolicySpec = "constant", **parameters: Any) -> None:
        super().__init__()
        self.policy = build_policy(policy, **parameters)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **rules: Unpack[AttentionRules],
    ) -> Tensor:
        """Compute attention with the policy of this module.

        Args:
            query: [..., H, Tq, D].
            key: [..., Hkv, Tk, D].
            value: [..., Hkv, Tk, Dv].
            attn_mask: as in `scaled_dot_product_attention`; so are all other arguments.
            **rules: the keywords of `scaled_dot_product_attention`, except `policy`.

        Returns:
            The output [..., H, Tq, Dv].

        Raises:
            ArgumentError: a shape or value is not accepted.
            ArgumentTypeError: a type, dtype or keyword is not accepted.
            BackendError: the explicit backend cannot compute this call.
        """
        torchs = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        if self.spread is not None:
            return self.spread(self.tap, *torchs, policy=self.policy, **rules)
        attend = attention_through(self.tap, own_keys=False if self.cross else None)
        return attend(*torchs, policy=self.policy, **rules)


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with a temperature policy: same constructor, calls and `state_dict` keys.

    Differences: `is_causal=True` does not need `attn_mask`. Rows without visible keys give zeros instead of NaN. Nested
    tensors are padded internally. Keys appended by `add_bias_kv` and `add_zero_attn` are visible to every row and
    counted in n.

    Args:
        embed_dim: size of the embedding, a multiple of `num_heads`.
        num_heads: number of heads.
        dropout: as in torch; so are `bias`, `add_bias_kv`, `add_zero_attn`, `kdim`, `vdim`, `batch_first`, `device` and
            `dtype`.
        policy: a name, a mapping, a YAML file or a policy object. `num_heads` and `head_dim` are filled in.

    Raises:
        ArgumentError: a size, the policy or one of its parameters is not accepted.

    Example:
        >>> attention = MultiheadAttention(32, 4, batch_first=True, policy="ssmax")
        >>> x = torch.randn(2, 10, 32)
        >>> output, weights = attention(x, x, x, is_causal=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))
    """

    policy: Policy
    tap: Tap | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: PolicySpec = "constant",
    ) -> None:
        embed_dim, num_heads = (
            read_int(name, value, "an int >= 1", least=1)
            for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads))
        )
        if embed_dim % num_heads:
            reject("embed_dim", embed_dim, f"a multiple of num_heads={num_heads}", ModuleArgumentError)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.adopt(build_policy_for(policy, num_heads=num_heads, head_dim=self.head_dim))

    def adopt(self, policy: Policy) -> None:
        """Set the policy, on this module's device and dtype, and disable torch's fused inference path.

        `nn.TransformerEncoderLayer` calls a fused kernel that ignores the policy, unless a module of the layer has a
        forward hook.
        """
        settle(policy, self, self.out_proj.weight.device)
        self.policy = policy
        self.register_forward_pre_hook(_close_fused_path)

    def discard_policy(self) -> None:
        """Undo `adopt`."""
        del self.policy
        for number, hook in list(self._forward_pre_hooks.items()):
            if hook is _close_fused_path:
                del self._forward_pre_hooks[number]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention. Masks follow `torch.nn.MultiheadAttention`.

        Args:
            query: [N, Tq, E] if `batch_first`, else [Tq, N, E]; [Tq, E] without a batch.
            key: [N, Tk, kdim], in the layout of the query.
            value: [N, Tk, vdim], in the layout of the query.
            key_padding_mask: [N, Tk]. Bool (True: hidden) or floating (added to the scores).
            need_weights: also return the weights.
            attn_mask: [Tq, Tk] or [N·H, Tq, Tk]. Bool (True: hidden) or floating (added to the scores).
            average_attn_weights: average the weights over the heads.
            is_causal: causal attention. Together with `attn_mask`, a hint that the mask is causal.

        Returns:
            The output in the layout of the query, and the weights [N, Tq, Tk], per head [N, H, Tq, Tk], or None.

        Raises:
            ArgumentError: a shape is not accepted (also torch's `AssertionError` and `RuntimeError`).
            ArgumentTypeError: a type or dtype is not accepted.
            BackendError: the module is sharded by tensor parallelism.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                reject_type(name, x, "a tensor [tokens, embedding], or with a batch axis")
            if not x.is_nested:
                check_dense(name, x)
                check_floating(name, x)
        if query.is_nested or key.is_nested or value.is_nested:
            masked = attn_mask is not None or key_padding_mask is not None or is_causal
            if not (query is key is value) or masked or not self.batch_first:
                raise ModuleDtypeError(
                    "a nested tensor is not accepted here: expected the same tensor as query, key and value, "
                    "batch_first=True and no masks"
                )
            padded, padding_of = pad_nested(query)
            found = self.forward(padded, padded, padded, padding_of, need_weights, None, average_attn_weights)
            return nest_like(query, found[0]), found[1]
        _check_dimensions(query, key, value, attn_mask, key_padding_mask)
        batched, own_keys, one_tensor = query.dim() == 3, query is key, query is key is value
        if not batched:
            query, key, value = query[None], key[None], value[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if one_tensor:
            key = value = query  # the same object again, for a single projection
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        self._check_shapes(query, key, value, attn_mask, key_padding_mask)

        q, k, v = self._project(query, key, value)
        added = k.shape[1] - key.shape[1]
        hint = is_causal and attn_mask is not None
        if hint and key_padding_mask is None and not need_weights and not added:
            attn_mask = None  # the hint replaces the mask it describes
        elif is_causal and (hint or added):
            is_causal = False
            if not hint:
                attn_mask = torch.ones(q.shape[1], key.shape[1], dtype=torch.bool, device=q.device).triu(1)
        mask, padding = self._masks(attn_mask, key_padding_mask, added, q.dtype)

        q, k, v = (rearrange(x, "n t (h d) -> n h t d", h=self.num_heads) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        rules: dict[str, Any] = {"attn_mask": mask, "key_padding": padding, "is_causal": is_causal}
        weights = None
        if need_weights:
            attended, weights = attention_and_weights(
                self.tap, q, k, v, dropout_p=dropout, own_keys=own_keys, policy=self.policy, **rules
            )
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            attend = attention_through(self.tap, own_keys=own_keys)
            attended = attend(q, k, v, dropout_p=dropout, policy=self.policy, **rules)
        out = self.out_proj(rearrange(attended, "n h t d -> n t (h d)"))
        if not batched:
            return out[0], weights
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check_shapes(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, padding: Tensor | None
    ) -> None:
        """Reject the shapes that torch rejects. Some of them would otherwise broadcast silently."""
        (n, rows, _), keys = query.shape, key.shape[1]
        accepted = {
            "query": (query, ((n, rows, self.embed_dim),)),
            "key": (key, ((n, keys, self.kdim),)),
            "value": (value, ((n, keys, self.vdim),)),
            "attn_mask": (attn_mask, ((n * self.num_heads, rows, keys), (rows, keys))),
            "key_padding_mask": (padding, ((n, keys),)),
        }
        for name, (tensor, shapes) in accepted.items():
            if tensor is not None and tuple(tensor.shape) not in shapes:
                raise ModuleArgumentError(
                    f"{name} of shape {tuple(tensor.shape)} is not accepted: Expected `{name}` shape to be "
                    f"{' or '.join(map(str, shapes))} (batch first; N = 1 for unbatched input)"
                )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input projections [N, T, E], plus the key and value appended by `add_bias_kv` and `add_zero_attn`."""
        if is_dtensor(self.out_proj.weight):
            raise BackendError(
                "MultiheadAttention does not support tensor parallelism: use separate projections and a "
                "ScaledDotProductAttention with attnscale.distributed.HeadParallel()"
            )
        packed, bias = self.in_proj_weight, None
        if self.in_proj_bias is not None:
            # torch accepts a bias of another dtype if the strides require a separate addition.
            bias = self.in_proj_bias.to(self.q_proj_weight.dtype if packed is None else packed.dtype)
        if packed is not None and query is key is value:
            q, k, v = F.linear(query, packed, bias).chunk(3, dim=-1)
        else:
            if packed is not None:
                weights = packed.chunk(3)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1).to(k.dtype)], dim=1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1).to(v.dtype)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _masks(
        self, attn_mask: Tensor | None, padding: Tensor | None, added: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Convert torch's masks to `attn_mask` (True: visible) and `key_padding`. Appended keys are visible."""
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = rearrange(attn_mask, "(n h) q k -> n h q k", h=self.num_heads)
            attn_mask = F.pad(attn_mask, (0, added))  # with False, or 0
        if padding is not None:
            padding = F.pad(padding, (0, added))
        if padding is not None and padding.dtype != torch.bool:
            # A floating padding mask is added to the scores, so it becomes part of attn_mask.
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=dtype).masked_fill(attn_mask, -math.inf)
            bias = padding[:, None, None]
            attn_mask, padding = bias if attn_mask is None else bias + attn_mask, None
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        return attn_mask, padding


def _check_dimensions(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, padding: Tensor | None
) -> None:
    """Reject mask types and dimensions that torch rejects.

    Messages about dimensions repeat the wording of torch's errors, which torch's tests match; so do those of
    `_check_shapes`.
    """
    dims = query.dim()
    if dims not in (2, 3):
        raise ModuleArgumentError(
            f"query of shape {list(query.shape)} is not accepted: query should be unbatched 2D or batched 3D tensor"
        )
    if key.dim() != dims or value.dim() != dims:
        raise ModuleArgumentError(
            f"key, value of shapes {list(key.shape)}, {list(value.shape)} are not accepted: expected `key` and `value` "
            f"to be {dims}-D but found {key.dim()}-D and {value.dim()}-D tensors respectively"
        )
    if is_causal_bias(attn_mask):
        raise ArgumentTypeError("attn_mask of torch's CausalBias is not accepted: expected is_causal=True")
    masks = (
        ("attn_mask", attn_mask, (2, 3), ", 2-D or 3-D"),
        ("key_padding_mask", padding, (dims - 1,), f" or {dims - 1}-D"),
    )
    for name, mask, accepted, said in masks:
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            reject_type(name, mask, "a tensor or None")
        check_dense(name, mask)
        if mask.dtype != torch.bool and not is_floating(mask.dtype):
            raise ModuleDtypeError(
                f"{name} of {mask.dtype} is not accepted: expected bool or a floating dtype of at least 16 bits"
            )
        if mask.dim() not in accepted:
            raise ModuleArgumentError(
                f"{name} of shape {list(mask.shape)} is not accepted: expected `{name}` to be `None`{said} but found "
                f"{mask.dim()}-D tensor instead"
            )


def _close_fused_path(module: nn.Module, inputs: Any) -> None:
    """No-op. A registered hook makes `nn.TransformerEncoderLayer` call the module instead of its fused kernel."""
