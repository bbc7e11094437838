"""Small kernels in PTX, for tests of the executor itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled.execution import NAN, Settings
from compiled.launching import Argument, Kernel, Map
from compiled.memory import Finding, Findings, GlobalMemory
from compiled.ptx.execute import execute

HEAD = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small({parameters}
)
.reqntid {threads}
{{
\t.reg .pred \t%p<9>;
\t.reg .b16 \t%rs<9>;
\t.reg .b32 \t%r<99>;
\t.reg .b64 \t%rd<9>;
{body}
}}
"""


def text_of(body: str, pointers: int, threads: int = 32, maps: int = 0) -> str:
    """A kernel that takes pointers in %rd1, %rd2, ..., then maps m_0, m_1, ..., and the thread in %r1."""
    given = [f".param .u64 .ptr .global .align 1 p_{i}" for i in range(pointers)]
    given += [f".param .align 64 .b8 m_{i}[128]" for i in range(maps)]
    given += [f".param .u64 .ptr .global .align 1 scratch_{i}" for i in range(2)]
    parameters = ",".join(f"\n\t{x}" for x in given)
    loads = "".join(f"\tld.param.b64 \t%rd{i + 1}, [p_{i}];\n" for i in range(pointers))
    return HEAD.format(parameters=parameters, threads=threads, body=f"{loads}\tmov.u32 \t%r1, %tid.x;\n{body}")


def run(
    body: str,
    tensors: Sequence[Tensor],
    *,
    in_c: bool,
    warps: int = 1,
    shared: int = 1024,
    grid: int = 1,
    settings: Settings = NAN,
    maps: Sequence[Map] = (),
) -> list[Finding]:
    """Execute a kernel whose last tensor is its output; return the findings."""
    kernel = Kernel("small", "sm_80", text_of(body, len(tensors), 32 * warps, len(maps)), shared, warps, ())
    arguments = [Argument(f"p_{i}", "*i8", x.data_ptr()) for i, x in enumerate(tensors)]
    arguments += [Argument(f"m_{i}", "map", 0, x) for i, x in enumerate(maps)]
    findings = Findings()
    execute(kernel, arguments, GlobalMemory(tensors, tensors[-1:]), findings, grid, settings, in_c=in_c)
    return findings.kept()
