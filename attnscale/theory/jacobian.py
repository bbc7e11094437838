"""The Jacobian norm of one layer on any tokens, in closed form: no autograd, and n in the thousands."""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale.theory.phase import directions


def jacobian_norm(x: Tensor, beta: float) -> float:
    """η = ‖∇_X X'‖²/(nd) of x'_j = Σ_k softmax_k(β⟨y_j, y_k⟩)·y_k, tokens [n, d], exact; O(n³ + n²d).

    With the weights A, the outputs μ = Ay and P_i the projection along y_i, the block of output j and input i is

        i = j:  P_j(A_jj·I + β·C_j)/‖x_j‖      C_j = Σ_k A_jk·(y_k − μ_j)(y_k − μ_j)ᵀ
        i ≠ j:  A_ji·P_i(I + β·y_j⊗(y_i − μ_j))/‖x_i‖

    which is what Lemmas B.2 and B.3 of seed 004 say, with the factor 1/‖x_i‖ that they print as ‖x_i‖^(−1/2).

    >>> round(jacobian_norm(torch.eye(3, dtype=torch.float64), 1e3), 12)
    0.666666666667
    """
    n, d = x.shape
    y = directions(x)
    inverse = x.square().sum(-1).reciprocal()  # [n], 1/‖x_i‖²
    gram = y @ y.T
    weights = torch.softmax(beta * gram, dim=-1)  # [j, k]
    toward = weights @ gram  # [j, k], ⟨μ_j, y_k⟩
    length = (weights * toward).sum(-1)  # [j], ‖μ_j‖²

    own = weights.diagonal()
    # tr C², tr C, yᵀCy and ‖Cy‖² of C_j along y_j, each from the Gram matrix.
    covariance_norm = ((weights @ gram.square()) * weights).sum(-1)
    covariance_norm = covariance_norm - 2 * (weights * toward.square()).sum(-1) + length.square()
    centred = gram - toward.diagonal()[:, None]  # [j, k], ⟨y_k − μ_j, y_j⟩
    along = weights * centred
    image = along @ y  # C_j·y_j, as Σ_k A_jk⟨y_k − μ_j, y_j⟩ = 0
    trace = 1.0 - length - (along * centred).sum(-1)  # tr(P_j C_j)
    projected = covariance_norm - image.square().sum(-1)  # ‖P_j C_j‖²
    own_blocks = inverse * (own.square() * (d - 1) + 2 * beta * own * trace + beta**2 * projected)

    across = gram * toward - toward.diagonal()[:, None]  # [j, i], ⟨P_i y_j, y_i − μ_j⟩
    perpendicular = 1.0 - gram.square()  # ‖P_i y_j‖²
    apart = 1.0 - 2 * toward + length[:, None]  # ‖y_i − μ_j‖²
    other = weights.square() * (d - 1 + 2 * beta * across + beta**2 * perpendicular * apart) * inverse
    return float((own_blocks.sum() + other.sum() - other.diagonal().sum()) / (n * d))
