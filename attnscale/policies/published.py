"""Temperatures of published systems, one preset each (policies/README.md §2.2).

Each preset uses n or the position like its original. All of them scale q only, even if the original also scales k
(YaRN, gpt-oss, LongRoPE), so that cached keys stay valid.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from typing import Any

import torch
from torch import Tensor

from attnscale.policies.base import FormulaPolicy, UniformPolicy, ln, real
from attnscale.policies.fields import length, not_negative, number, positive


def _ratio(default: Any = MISSING) -> Any:
    """The field s = extended length / trained length."""
    return number("a number > 0 (extended length / trained length)", default, above=0.0)


@dataclass(eq=False, repr=False, kw_only=True)
class Yarn(UniformPolicy):
    """YaRN (arXiv:2309.00071): (1 + 0.1·ln s)², s = extended length / trained length.

    The same β for every row; 1 for s ≤ 1.

    Args:
        factor: s > 0.
        coefficient: The factor 0.1 of ln s.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("yarn", factor=4)(8192)
        tensor(1.2965)
    """

    name = "yarn"
    factor: float = _ratio()
    coefficient: float = not_negative(0.1)

    def value(self) -> float:
        return (1 + self.coefficient * _ln_ratio(self.factor)) ** 2


@dataclass(eq=False, repr=False, kw_only=True)
class GptOss(Yarn):
    """gpt-oss: YaRN's factor (1 + 0.1·ln s)² at s = 32.

    The same β for every row.

    Args:
        factor: s > 0.
        coefficient: The factor 0.1 of ln s.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("gpt_oss")(8192)
        tensor(1.8133)
    """

    name = "gpt_oss"
    factor: float = _ratio(32.0)


@dataclass(eq=False, repr=False, kw_only=True)
class DeepSeek(UniformPolicy):
    """DeepSeek-V2 and V3: (1 + 0.1·m·ln s)²; V3 has m = 1 and s = 40.

    The same β for every row.

    Args:
        factor: s = extended length / trained length, > 0.
        mscale: m ≥ 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("deepseek")(8192)
        tensor(1.8739)
    """

    name = "deepseek"
    factor: float = _ratio(40.0)
    mscale: float = not_negative(1.0)

    def value(self) -> float:
        return (1 + 0.1 * self.mscale * _ln_ratio(self.factor)) ** 2


@dataclass(eq=False, repr=False, kw_only=True)
class LongRope(UniformPolicy):
    """LongRoPE (arXiv:2402.13753), as in Phi-3: 1 + ln s / ln L0.

    The same β for every row.

    Args:
        factor: s = extended length / trained length, > 0.
        original_length: The trained length L0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("longrope", factor=32, original_length=4096)(8192)
        tensor(1.4167)
    """

    name = "longrope"
    factor: float = _ratio()
    original_length: int = length()

    def value(self) -> float:
        return 1 + _ln_ratio(self.factor) / math.log(self.original_length)


@dataclass(eq=False, repr=False, kw_only=True)
class DRoPE(UniformPolicy):
    """DroPE: 1 + c·ln s, c = 0.412 or 0.103.

    The same β for every row.

    Args:
        factor: s = extended length / trained length, > 0.
        coefficient: c ≥ 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("drope", factor=4)(8192)
        tensor(1.5712)
    """

    name = "drope"
    factor: float = _ratio()
    coefficient: float = not_negative(0.412)

    def value(self) -> float:
        return 1 + self.coefficient * _ln_ratio(self.factor)


@dataclass(eq=False, repr=False, kw_only=True)
class Qwen(FormulaPolicy):
    """Qwen (arXiv:2309.16609): max(1, ln(pos + 1) / ln L), L = 2048 or 8192.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        reference_length: The trained length L.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("qwen")(8192)
        tensor(1.1818)
    """

    name = "qwen"
    uses_position = True
    reference_length: int = length(2048)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return (ln(position + 1) / math.log(self.reference_length)).clamp(min=1.0)


@dataclass(eq=False, repr=False, kw_only=True)
class Swan(FormulaPolicy):
    """SWAN-GPT (arXiv:2504.08719): ln(pos + a) / ln a; the paper does not state a, so it is required.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        a: The constant a ≥ 2.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("swan", a=1000)(8192)
        tensor(1.3211)
    """

    name = "swan"
    uses_position = True
    a: int = length()

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return ln(position + self.a) / math.log(self.a)


@dataclass(eq=False, repr=False, kw_only=True)
class HypeNet(Swan):
    """HypeNet: ln(pos + a) / ln a with a = 500.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        a: The constant a ≥ 2.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("hypenet")(8192)
        tensor(1.4595)
    """

    name = "hypenet"
    a: int = length(500)


@dataclass(eq=False, repr=False, kw_only=True)
class Llama4(FormulaPolicy):
    """Llama 4, NoPE layers: 1 + 0.1·ln(1 + ⌊(pos + 1) / 8192⌋).

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        floor_length: The length 8192 of a step.
        coefficient: The factor 0.1 of the logarithm.

    Example:
        >>> import torch
        >>> from attnscale import build_policy
        >>> build_policy("llama4")(torch.tensor([8191, 8192]))
        tensor([1.0000, 1.0693])
    """

    name = "llama4"
    uses_position = True
    floor_length: int = length(8192, least=1)
    coefficient: float = positive(0.1)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return 1 + self.coefficient * torch.log(real(1 + (position + 1) // self.floor_length))


@dataclass(eq=False, repr=False, kw_only=True)
class Mistral(FormulaPolicy):
    """Ministral 3, Mistral 4: 1 + 0.1·ln(1 + ⌊pos / L0⌋), without + 1; L0 = 16384 or 8192.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        floor_length: The length L0 of a step.
        coefficient: The factor 0.1 of the logarithm.

    Example:
        >>> import torch
        >>> from attnscale import build_policy
        >>> build_policy("mistral")(torch.tensor([16384, 16385]))
        tensor([1.0000, 1.0693])
    """

    name = "mistral"
    uses_position = True
    floor_length: int = length(16384, least=1)
    coefficient: float = positive(0.1)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return 1 + self.coefficient * torch.log(real(1 + position // self.floor_length))


@dataclass(eq=False, repr=False, kw_only=True)
class Grok2(FormulaPolicy):
    """Grok-2: 1 up to pos = T, then log₂ pos / log₂ T; T = 1024.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        threshold: T ≥ 2.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("grok2")(4097)
        tensor(1.2000)
    """

    name = "grok2"
    uses_position = True
    threshold: int = length(1024)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return torch.log2(real(position.clamp(min=self.threshold))) / math.log2(self.threshold)


@dataclass(eq=False, repr=False, kw_only=True)
class Inkling(FormulaPolicy):
    """Inkling: 1 + 0.1·ln max(1, (pos + 1) / n0), n0 = 128000.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        floor_length: The length n0.
        coefficient: The factor 0.1 of the logarithm.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("inkling")(256_000)
        tensor(1.0693)
    """

    name = "inkling"
    uses_position = True
    floor_length: int = length(128_000, least=1)
    coefficient: float = positive(0.1)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return 1 + self.coefficient * torch.log((real(position + 1) / self.floor_length).clamp(min=1.0))


@dataclass(eq=False, repr=False, kw_only=True)
class Beam(FormulaPolicy):
    """Beam, NoPE layers: (1 + (pos + 1) / 2048)^0.1.

    β has the shape of n. Uses the position, n − 1 if unknown.

    Args:
        reference_length: The length 2048.
        exponent: The exponent 0.1.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("beam")(8192)
        tensor(1.1746)
    """

    name = "beam"
    uses_position = True
    reference_length: int = length(2048, least=1)
    exponent: float = positive(0.1)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return torch.exp(self.exponent * torch.log1p(real(position + 1) / self.reference_length))


@dataclass(eq=False, repr=False, kw_only=True)
class DualChunk(FormulaPolicy):
    """Dual chunk attention (Qwen2.5-1M): max(1, 1 + 0.1·ln(N / L0)), N the length of the request so far.

    In the original, prefill and decoding differ by definition: prefill gives every row of a prompt the N of the whole
    prompt, decoding the N reached so far. By default N is pos + 1 of the row, as in decoding, so that both agree here.
    `prompt_length` sets the N of a prefill, and β is then the same for every row. β has the shape of n. Uses the
    position, n − 1 if unknown. Left out: the remapping of positions in chunks.

    Args:
        original_length: The trained length L0.
        prompt_length: The length N of the prompt, for the original's prefill; None for N = pos + 1.
        coefficient: The factor 0.1 of the logarithm.

    Example:
        >>> import torch
        >>> from attnscale import build_policy
        >>> build_policy("dual_chunk", original_length=262144)(torch.tensor([262_144, 1_048_576]))
        tensor([1.0000, 1.1386])
    """

    name = "dual_chunk"
    uses_position = True
    original_length: int = length()
    prompt_length: int | None = length(None, least=1)
    coefficient: float = positive(0.1)

    @property
    def uniform(self) -> float | None:
        if self.prompt_length is None:
            return None
        return 1 + self.coefficient * _ln_ratio(self.prompt_length / self.original_length)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        request = position + 1 if self.prompt_length is None else torch.full_like(position, self.prompt_length)
        return 1 + self.coefficient * torch.log((real(request) / self.original_length).clamp(min=1.0))


@dataclass(eq=False, repr=False, kw_only=True)
class Pippo(FormulaPolicy):
    """Pippo (arXiv:2502.07785), multi-view diffusion: √(1.4·ln n / ln 444).

    β has the shape of n; it is √1.4 at the trained length. The released code takes the tokens of its training views as
    the trained length, for example 12288 at 512 × 512 pixels.

    Args:
        reference_length: The trained length 444.
        growth: The factor 1.4.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("pippo")(8192)
        tensor(1.4386)
    """

    name = "pippo"
    reference_length: int = length(444)
    growth: float = positive(1.4)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return (self.growth * ln(n) / math.log(self.reference_length)).sqrt()


@dataclass(eq=False, repr=False, kw_only=True)
class SuEntropy(FormulaPolicy):
    """Entropy-invariant attention (Su, 2021): ln n / ln 512.

    β has the shape of n.

    Args:
        reference_length: The length 512 with β = 1.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("su_entropy")(8192)
        tensor(1.4444)
    """

    name = "su_entropy"
    reference_length: int = length(512)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return ln(n) / math.log(self.reference_length)


@dataclass(eq=False, repr=False, kw_only=True)
class InfoScale(FormulaPolicy):
    """InfoScale (arXiv:2501.08570): √(1 − n^(−2/d)) / √(1 − L^(−2/d)), d the head dimension; ≈ √(ln n / ln L).

    β has the shape of n.

    Args:
        head_dim: The head dimension d.
        reference_length: The trained length L.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("infoscale", head_dim=64, reference_length=2048)(8192)
        tensor(1.0759)
    """

    name = "infoscale"
    head_dim: int = length(least=1)
    reference_length: int = length()

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        # −expm1 avoids the cancellation of 1 − n^(−2/d) for large d.
        information = -torch.expm1(-2 / self.head_dim * ln(n))
        return (information / -math.expm1(-2 / self.head_dim * math.log(self.reference_length))).sqrt()


@dataclass(eq=False, repr=False, kw_only=True)
class Lumina(FormulaPolicy):
    """Training-free resolution extension (arXiv:2306.08645), as in Lumina: √(ln n / ln L).

    β has the shape of n.

    Args:
        reference_length: The trained length L.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("lumina", reference_length=2048)(8192)
        tensor(1.0871)
    """

    name = "lumina"
    reference_length: int = length()

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return (ln(n) / math.log(self.reference_length)).sqrt()


@dataclass(eq=False, repr=False, kw_only=True)
class RandomEnergy(FormulaPolicy):
    """Random energy model: t·√(2 ln n) / σ, σ the standard deviation of raw scores; critical at t = 1.

    Gaussian scores condense onto their largest values for t > 1. β has the shape of n.

    Args:
        sigma: σ > 0.
        t: β relative to the critical value, > 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("rem")(8192)
        tensor(4.2452)
    """

    name = "rem"
    sigma: float = positive(1.0)
    t: float = positive(1.0)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return self.t * (2 * ln(n)).sqrt() / self.sigma


@dataclass(eq=False, repr=False, kw_only=True)
class Simplex(FormulaPolicy):
    """Critical scale of a simplex (arXiv:2510.05554): ln n / (1 − ρ), ρ the mean cosine between tokens.

    β has the shape of n.

    Args:
        rho: ρ in (−1, 1).

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("simplex", rho=0.5)(8192)
        tensor(18.0218)
    """

    name = "simplex"
    rho: float = number("a number in (-1, 1)", above=-1.0, below=1.0)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return ln(n) / (1 - self.rho)


@dataclass(eq=False, repr=False, kw_only=True)
class Sphere(FormulaPolicy):
    """Critical scale of keys uniform on the sphere in dimension d: λ·(n·C_d)^(2/(d−1)).

    C_d = 2^((d−1)/2)·Γ(d/2) / ((d−1)·√π·Γ((d−1)/2)). Intended for cosine scores: normalise q and k and pass `scale=1`.
    β has the shape of n.

    Args:
        head_dim: The head dimension d ≥ 2.
        strength: The factor λ > 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("sphere", head_dim=64)(8192)
        tensor(2.4209)
    """

    name = "sphere"
    head_dim: int = length()
    strength: float = positive(1.0)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        d = self.head_dim
        ln_c = (d - 1) / 2 * math.log(2) + math.lgamma(d / 2) - math.lgamma((d - 1) / 2)
        ln_c -= math.log(d - 1) + math.log(math.pi) / 2
        return self.strength * torch.exp(2 / (d - 1) * (torch.log(real(n)) + ln_c))


def _ln_ratio(factor: float) -> float:
    return math.log(max(1.0, factor))
