"""What this machine has: versions, devices, and a self-check of every backend."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import NamedTuple

import torch

from attnscale.attention import scaled_dot_product_attention
from attnscale.backends.dispatch import BACKENDS
from attnscale_kernels import interpreting, why_unavailable

_PACKAGES = ("attnscale", "torch", "einops", "triton", "transformers", "numpy")


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    subject: str
    value: str


class Diagnosis(NamedTuple):
    """The report of `doctor`; prints as a table."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        widths = [max(len(finding[column]) for finding in self.findings) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in self.findings)


def doctor() -> Diagnosis:
    """Versions, devices and backends of this machine; each backend computes one small attention and is compared.

    >>> print(doctor())  # doctest: +ELLIPSIS
    version...attnscale...
    """
    findings = [Finding("version", "python", platform.python_version())]
    findings += [Finding("version", package, _version(package)) for package in _PACKAGES]
    findings += [Finding("device", "cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        findings.append(Finding("device", f"cuda:{index}", torch.cuda.get_device_name(index)))
    if torch.backends.mps.is_available():
        findings.append(Finding("device", "mps", "available"))
    findings += [Finding("backend", name, _self_check(name)) for name in BACKENDS if name != "triton"]
    findings.append(Finding("backend", "triton", why_unavailable() or _self_check("triton")))
    return Diagnosis(tuple(findings))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _self_check(backend: str) -> str:
    """The largest error of one small causal attention under the log law, against fp64."""
    device = "cuda" if backend == "triton" and not interpreting() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16, generator=generator).to(device) for _ in range(3))
    exact = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, policy="log", backend="reference"
    )
    error = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend=backend) - exact
    place = "in triton's interpreter" if backend == "triton" and interpreting() else f"on {device}"
    return f"works {place}, error {error.abs().max().item():.0e} in fp32"
