"""Environment report: versions, devices, and a self-check of every backend."""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch

from attnscale._util.files import cache_folder
from attnscale._util.optional import NOT_INSTALLED, version_of
from attnscale._util.versions import PYTHON, TRANSFORMERS
from attnscale.attention import scaled_dot_product_attention
from attnscale.backends import trust
from attnscale.backends.dispatch import BACKENDS, check_kernels
from attnscale_kernels import interpreting, why_unavailable

_PACKAGES = ("attnscale", "torch", "einops", "triton", "transformers", "numpy")


class Finding(NamedTuple):
    """One row of the report."""

    topic: str
    subject: str
    value: str


class Diagnosis(NamedTuple):
    """The report of `doctor`; `str()` gives a table."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        widths = [max(len(finding[column]) for finding in self.findings) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in self.findings)


def doctor() -> Diagnosis:
    """Return versions, devices and the error of every backend on a small attention call, against fp64.

    A version of Python or transformers outside the supported range is reported with that range.

    If the Triton kernels are available, the check that enables them for "auto" is repeated on every GPU.

    Returns:
        A `Diagnosis`; print it for a table.

    Example:
        >>> print(doctor())  # doctest: +ELLIPSIS
        version...attnscale...
    """
    versions = {"python": platform.python_version()} | {package: version_of(package) for package in _PACKAGES}
    findings = [Finding("version", package, _judged(package, version)) for package, version in versions.items()]
    findings += [Finding("device", "cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        findings.append(Finding("device", f"cuda:{index}", torch.cuda.get_device_name(index)))
    if torch.backends.mps.is_available():
        findings.append(Finding("device", "mps", "available"))
    findings += [Finding("backend", name, _self_check(name)) for name in BACKENDS if name != "triton"]
    findings.append(Finding("backend", "triton", why_unavailable() or _self_check("triton")))
    return Diagnosis((*findings, *_trust()))


def _judged(package: str, version: str) -> str:
    """Return a version, and the supported range of its package if the version is outside of it."""
    supported = {"python": PYTHON, "transformers": TRANSFORMERS}.get(package)
    if supported is None or version == NOT_INSTALLED or supported.covers(version):
        return version
    return f"{version}, outside the supported range {supported.oldest} to {supported.newest}"


def _trust() -> list[Finding]:
    """Return whether "auto" may use the kernels, per device and dtype: the repeated check and the cached result."""
    if interpreting() or why_unavailable() is not None:
        return []
    by_hand = trust.chosen_by_hand()
    findings = [] if by_hand is None else [Finding("triton", trust.BY_HAND, "1" if by_hand else "0")]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            before = trust.remembered(device, dtype)
            try:
                now = f"check {trust.repeat(device, dtype, check_kernels)}"
            except torch.OutOfMemoryError:
                now = "check failed: out of memory"
            text = f"{now}, {f'previous result: {before}' if before else 'no previous result'}"
            findings.append(Finding("triton", f"{device} {str(dtype).removeprefix('torch.')}", text))
    return [*findings, Finding("triton", "cache folder", str(cache_folder()))]


def _self_check(backend: str) -> str:
    """Return the largest error of a small causal attention call with the policy log, against fp64."""
    device = "cuda" if backend == "triton" and not interpreting() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16, generator=generator, device=generator.device).to(device) for _ in range(3))
    exact = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, policy="log", backend="reference"
    )
    error = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend=backend) - exact
    place = "in triton's interpreter" if backend == "triton" and interpreting() else f"on {device}"
    return f"works {place}, error {error.abs().max().item():.0e} in fp32"
