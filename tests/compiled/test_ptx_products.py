"""Matrix products of a warpgroup: layouts of both factors, and what is reported, each on a small kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled.small_ptx import run

pytestmark = pytest.mark.parametrize("in_c", [True, False], ids=["c", "numpy"])

N = 64  # columns
RESULTS = ", ".join(f"%r{40 + i}" for i in range(N // 2))
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}
MODES = {0: 0, 128: 1, 64: 2, 32: 3}
# tf32 factors are not transposed.
LAYOUTS = [(kind, width, False) for kind in KINDS for width in MODES]
LAYOUTS += [(kind, width, True) for kind in ("bf16", "f16") for width in MODES]
BASE = 1024  # of the second factor in shared memory, behind the first one


def kinds(found: list) -> set[str]:
    return {finding.kind for finding in found}


def image_of(matrix: Tensor, width: int, transposed: bool) -> tuple[Tensor, int, int]:
    """A factor [rows, depth] as bytes in shared memory, with its leading and stride offsets.

    Bytes are laid out in units of 16 along the axis that is contiguous. A pattern has 8 rows of `width` bytes, in which
    unit i of row r is at place i ^ (r · width / 128). Without a pattern 8 units follow each other.
    """
    lines = matrix.T.contiguous() if transposed else matrix
    units = lines.contiguous().view(torch.uint8).reshape(len(lines), -1, 16)  # [line, unit, byte]
    across, groups = units.shape[1], len(lines) // 8
    image = torch.zeros(units.numel(), dtype=torch.uint8)
    in_row = width // 16 or 1
    pattern = 128 * in_row  # bytes of 8 rows
    # Patterns along the lines of one set of columns, then the next set.
    apart = pattern * groups
    for line in range(len(lines)):
        for unit in range(across):
            row, inside = line % 8, unit % in_row
            inside ^= row * in_row // 8 if width else 0
            at = unit // in_row * apart + line // 8 * pattern + row * 16 * in_row + 16 * inside
            image[at : at + 16] = units[line, unit]
    if width or not transposed:
        return image, apart, pattern
    return image, pattern, apart


def descriptor(start: int, leading: int, stride: int, width: int) -> int:
    """The bits of a matrix descriptor, as a signed number."""
    bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODES[width] << 62
    return bits - (1 << 64) if bits >> 63 else bits


def fragments_of(a: Tensor) -> Tensor:
    """The four registers of each thread for a first factor [64, depth], as words [128, 4]."""
    thread = torch.arange(128)
    down, across = 16 * (thread // 32) + thread % 32 // 4, thread % 4
    words = a.contiguous().view(torch.int32)  # [64, 8]
    return torch.stack([words[down + 8 * (i % 2), across + 4 * (i // 2)] for i in range(4)], 1)


def result_of(words: Tensor) -> Tensor:
    """The product [64, N] from the registers of each thread."""
    values = words.view(torch.float32).reshape(128, N // 8, 2, 2)
    found = torch.zeros(64, N)
    for thread in range(128):
        down, across = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        for block in range(N // 8):
            for half in range(2):
                columns = slice(8 * block + across, 8 * block + across + 2)
                found[down + 8 * half, columns] = values[thread, block, half]
    return found


# All threads copy the factors (%rd1, 4096 bytes) to shared memory, and load the fragments of the first one (%rd2).
PIECES = [
    f"""
\tshl.b32 \t%r2, %r1, 2;
\tmul.wide.u32 \t%rd8, %r1, 4;
\tadd.s64 \t%rd5, %rd1, %rd8;
\tld.global.b32 \t%r3, [%rd5+{512 * i}];
\tst.shared.b32 \t[%r2+{512 * i}], %r3;
"""
    for i in range(8)
]
LOAD = "".join(PIECES)
FRAGMENTS = """
\tmul.wide.u32 \t%rd8, %r1, 16;
\tadd.s64 \t%rd6, %rd2, %rd8;
\tld.global.v4.b32 \t{%r20, %r21, %r22, %r23}, [%rd6];
"""
ZEROS = "".join(f"\tmov.b32 \t%r{40 + i}, 0f3F800000;\n" for i in range(N // 2))
STORE = f"\tmul.wide.u32 \t%rd8, %r1, {2 * N};\n\tadd.s64 \t%rd7, %rd3, %rd8;\n" + "".join(
    f"\tst.global.v4.b32 \t[%rd7+{16 * i}], {{ {', '.join(f'%r{40 + 4 * i + j}' for j in range(4))} }};\n"
    for i in range(N // 8)
)
READY = "\tfence.proxy.async.shared::cta;\n\tbar.sync \t0;\n"
FENCE = "\twgmma.fence.sync.aligned;\n"
COMMIT = "\twgmma.commit_group.sync.aligned;\n"
WAIT = "\twgmma.wait_group.sync.aligned 0;\n"
PLAIN = descriptor(BASE, 1024, 128, 0)
PRODUCT = f"""
\tmov.b64 \t%rd4, {PLAIN};
\twgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 {{{RESULTS}}}, {{%r20, %r21, %r22, %r23}}, %rd4, 1, 1, 1, 0;
"""


def code_of(**changes: str) -> str:
    """The program of a product; `changes` replaces its parts or puts something in front of the next one."""
    parts = {"load": LOAD + FRAGMENTS, "ready": READY, "zeros": ZEROS, "fence": FENCE, "product": PRODUCT}
    parts |= {"commit": COMMIT, "between": "", "wait": WAIT, "after": "", "store": STORE, "end": "\tret;"}
    return "".join((parts | changes).values())


def product(code: str, in_c: bool, warps: int = 4) -> tuple[list, Tensor, Tensor]:
    """Findings, result and expectation of a product of bf16 numbers with factors of −1, ..., 1."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (64, 16), generator=generator).div(4).bfloat16() for _ in range(2))
    image = torch.zeros(4096, dtype=torch.uint8)
    image[BASE : BASE + 2048] = image_of(b, 0, False)[0]
    out = torch.zeros(32 * warps, N // 2, dtype=torch.int32)
    fragments = fragments_of(a).repeat(warps // 4, 1)
    found = run(code, [image, fragments, out], in_c=in_c, warps=warps, shared=4096)
    return found, result_of(out[:128]), a.float() @ b.float().T + 1.0


def test_the_accumulator_is_added_once(in_c: bool) -> None:
    found, got, expected = product(code_of(), in_c)
    assert found == []
    assert torch.equal(got, expected)


def test_it_is_not_read_where_the_predicate_is_false(in_c: bool) -> None:
    found, got, expected = product(code_of(product=PRODUCT.replace("%rd4, 1, 1, 1", "%rd4, 0, 1, -1")), in_c)
    assert found == []
    assert torch.equal(got, 1.0 - expected)


@pytest.mark.parametrize("in_registers", [True, False], ids=["registers", "shared"])
@pytest.mark.parametrize(("kind", "width", "transposed"), LAYOUTS)
def test_factors_are_read_from_every_layout(
    in_c: bool, kind: str, width: int, transposed: bool, in_registers: bool
) -> None:
    depth = 8 if kind == "tf32" else 16
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (64, depth), generator=generator).to(KINDS[kind]) for _ in range(2))
    # Rows of a pattern are longer than 32 bytes of a factor that is contiguous in depth; the rest is not read.
    padded = [x if transposed or not width else torch.cat([x] * (width // 32), 1) for x in (a, b)]
    (one, *strides), (other, *others) = (image_of(x, width, transposed) for x in padded)
    first, second = 0, max(2048, len(one))
    image = torch.zeros(second + len(other), dtype=torch.uint8)
    image[first : len(one)], image[second:] = one, other
    image = torch.cat([image, torch.zeros(16384 - len(image), dtype=torch.uint8)])
    load = LOAD + "".join(
        f"\tld.global.b32 \t%r3, [%rd5+{i}];\n\tst.shared.b32 \t[%r2+{i}], %r3;\n" for i in range(4096, 16384, 512)
    )
    factor = "{%r20, %r21, %r22, %r23}" if in_registers else "%rd0"
    flags = "" if kind == "tf32" else f", {int(transposed)}" if in_registers else f", {int(transposed)}" * 2
    started = f"""
\tmov.b64 \t%rd4, {descriptor(second, *others, width)};
\tmov.b64 \t%rd0, {descriptor(first, *strides, width)};
\twgmma.mma_async.sync.aligned.m64n{N}k{depth}.f32.{kind}.{kind} {{{RESULTS}}}, {factor}, %rd4, 1, 1, 1{flags};
"""
    out = torch.zeros(128, N // 2, dtype=torch.int32)
    code = code_of(load=load + FRAGMENTS, product=started)
    assert run(code, [image, fragments_of(a), out], in_c=in_c, warps=4, shared=16384) == []
    assert torch.equal(result_of(out), a.float() @ b.float().T + 1.0)


OTHER_SHAPE = PRODUCT.replace(f"n{N}", "n8").replace(RESULTS, ", ".join(RESULTS.split(", ")[:4]))
RENAMED = "\tmov.b32 \t%r39, %r40;\n\tmov.b32 \t%r40, %r39;\n"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"between": "\tadd.f32 \t%r39, %r40, %r41;\n"}, {"PRODUCT_UNDER_WAY"}),
        ({"after": "\tadd.f32 \t%r39, %r40, %r41;\n"}, set()),
        ({"between": "\tmov.b32 \t%r21, 0;\n"}, {"PRODUCT_UNDER_WAY"}),
        ({"after": "\tmov.b32 \t%r21, 0;\n"}, set()),
        ({"wait": "", "end": WAIT + "\tret;"}, {"PRODUCT_UNDER_WAY"}),
        ({"wait": WAIT.replace("0", "1"), "end": WAIT + "\tret;"}, {"PRODUCT_UNDER_WAY"}),
        ({"commit": "", "end": COMMIT + WAIT + "\tret;"}, {"PRODUCT_UNDER_WAY"}),
        ({"commit": "", "between": COMMIT}, set()),
        ({"wait": "", "store": "", "end": "\tret;"}, {"LEFT_UNDER_WAY"}),
        ({"fence": ""}, {"REGISTER_FENCE"}),
        ({"fence": FENCE + "\tmov.b32 \t%r40, 0;\n"}, {"REGISTER_FENCE"}),
        ({"fence": FENCE + "\txor.b32 \t%r21, %r21, 0;\n"}, {"REGISTER_FENCE"}),
        ({"fence": RENAMED + FENCE}, set()),
        ({"fence": FENCE + RENAMED}, set()),  # a move that gives a fenced value another name
        ({"fence": "\tadd.f32 \t%r40, %r40, 0f00000000;\n" + RENAMED, "zeros": ZEROS + FENCE}, {"REGISTER_FENCE"}),
        ({"product": PRODUCT + PRODUCT}, set()),
        ({"product": PRODUCT + OTHER_SHAPE}, {"PRODUCT_UNDER_WAY"}),
        ({"product": PRODUCT + COMMIT + WAIT + OTHER_SHAPE}, {"REGISTER_FENCE"}),
        ({"product": PRODUCT + COMMIT + WAIT + FENCE + OTHER_SHAPE}, set()),
    ],
    ids=[
        "read_early", "read_later", "factor_written_early", "factor_written_later", "no_wait", "waits_for_less",
        "no_commit", "commit", "left", "no_fence", "accumulator_behind_fence", "factor_behind_fence",
        "renamed_in_front", "renamed_behind", "unfenced_renamed", "same_shape", "other_shape",
        "other_shape_without_fence", "other_shape_with_fence",
    ],
)  # fmt: skip
def test_registers_of_a_product(in_c: bool, changes: dict[str, str], found: set[str]) -> None:
    assert kinds(product(code_of(**changes), in_c)[0]) == found


WRITE = f"\tst.shared.b32 \t[%r2+{BASE}], %r2;\n"
LATE = "\tfence.proxy.async.shared::cta;\n"
ASYNCHRONOUS_COPY = (
    PIECES[0]
    + FRAGMENTS
    + f"""
\tshl.b32 \t%r2, %r1, 4;
\tmul.wide.u32 \t%rd8, %r1, 16;
\tadd.s64 \t%rd5, %rd1, %rd8;
\tcp.async.cg.shared.global \t[%r2+{BASE}], [%rd5+{BASE}], 16;
\tcp.async.commit_group;
"""
)
COPIED = "\tcp.async.wait_group \t0;\n"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"between": "\tbar.sync \t0;\n" + WRITE}, {"FACTOR_UNDER_WAY", "RACE"}),
        ({"between": WRITE}, {"RACE", "RACE_IN_WARP"}),
        ({"after": "\tbar.sync \t0;\n" + WRITE}, set()),
        ({"after": WRITE}, {"RACE"}),  # other warps may still read
        ({"ready": "\tbar.sync \t0;\n"}, {"PROXY"}),
        ({"load": LATE + LOAD + FRAGMENTS, "ready": "\tbar.sync \t0;\n"}, {"PROXY"}),
        ({"ready": "\tbar.sync \t0;\n" + LATE}, set()),
        ({"ready": "\tbar.sync \t0;\n" + LATE + "\tbar.sync \t0;\n"}, set()),
        ({"ready": LATE}, {"RACE", "RACE_IN_WARP"}),
        ({"load": ASYNCHRONOUS_COPY + COPIED}, set()),
        ({"load": ASYNCHRONOUS_COPY, "ready": READY + COPIED + "\tbar.sync \t0;\n"}, {"PROXY"}),
        ({"load": ASYNCHRONOUS_COPY, "between": COPIED}, {"COPY_UNDER_WAY", "RACE"}),
        ({"product": PRODUCT.replace(str(PLAIN), str(descriptor(16 * 250, 1024, 128, 0)))}, {"SHARED_OUTSIDE"}),
        ({"product": PRODUCT.replace(str(PLAIN), str(PLAIN | 1 << 49))}, {"DESCRIPTOR"}),
        ({"product": PRODUCT.replace(str(PLAIN), str(PLAIN | 1 << 14))}, {"DESCRIPTOR"}),
    ],
    ids=[
        "written_early", "written_in_the_epoch", "written_behind_barrier", "written_later", "no_proxy_fence",
        "fence_too_early", "fence_behind_barrier", "fence_between_barriers", "no_barrier", "copied",
        "copied_behind_fence", "copy_under_way", "outside", "base_offset", "unknown_bit",
    ],
)  # fmt: skip
def test_factors_in_shared_memory(in_c: bool, changes: dict[str, str], found: set[str]) -> None:
    assert kinds(product(code_of(**changes), in_c)[0]) == found


ONE_WARP = "\tsetp.lt.u32 \t%p1, %r1, 32;\n\t@%p1 bra \t$L__skip;\n"
UNEQUAL = "\tshr.u32 \t%r30, %r1, 5;\n\tcvt.u64.u32 \t%rd8, %r30;\n\tadd.s64 \t%rd4, %rd4, %rd8;\n\twgmma"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"product": ONE_WARP + PRODUCT + "$L__skip:\n"}, {"WARPGROUP"}),
        ({"product": PRODUCT.replace("wgmma", UNEQUAL)}, {"WARPGROUP"}),
        ({"fence": ONE_WARP + FENCE + "$L__skip:\n"}, {"WARPGROUP", "REGISTER_FENCE"}),
        ({"product": PRODUCT.replace("wgmma", UNEQUAL.replace("5", "4"))}, {"CONVERGENCE", "WARPGROUP"}),
        (
            {"product": "\tand.b32 \t%r30, %r1, 1;\n\tsetp.eq.b32 \t%p1, %r30, 0;\n"
             + PRODUCT.replace("wgmma.mma", "@%p1 wgmma.mma")},
            {"CONVERGENCE"},
        ),
    ],
    ids=["not_all_warps", "unequal_descriptors", "unequal_fences", "unequal_lanes", "half_the_lanes"],
)  # fmt: skip
def test_all_warps_of_a_warpgroup_execute_the_same(in_c: bool, changes: dict[str, str], found: set[str]) -> None:
    assert kinds(product(code_of(**changes), in_c)[0]) == found


def test_two_warpgroups_are_independent(in_c: bool) -> None:
    # The second warpgroup has no product.
    skip = "\tsetp.ge.u32 \t%p1, %r1, 128;\n\t@%p1 bra \t$L__skip;\n"
    load = LOAD.replace("%r1, 2", "%r35, 2").replace("%r1, 4", "%r35, 4")
    load = "\tand.b32 \t%r35, %r1, 127;\n" + load + FRAGMENTS
    code = code_of(load=load, fence=skip + FENCE, wait=WAIT + "$L__skip:\n")
    found, got, expected = product(code, in_c, warps=8)
    assert found == []
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="2 warps are no warpgroups"):
        run(FENCE + "\tret;", [torch.zeros(1)], in_c=in_c, warps=2)


def test_matrices_are_stored_as_they_are_loaded(in_c: bool) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    for stored, loaded, swapped in (("", "", False), (".trans", ".trans", False), (".trans", "", True)):
        code = f"""
\tshl.b32 \t%r2, %r1, 4;
\tmov.b32 \t%r5, 65536;
\tmad.lo.s32 \t%r3, %r1, 131073, %r5;
\tstmatrix.sync.aligned.m8n8.x1{stored}.shared.b16 [%r2], {{%r3}};
\tbar.warp.sync \t-1;
\tldmatrix.sync.aligned.m8n8.x1{loaded}.shared.b16 {{%r4}}, [%r2];
\tmul.wide.u32 \t%rd8, %r1, 4;
\tadd.s64 \t%rd7, %rd1, %rd8;
\tst.global.b32 \t[%rd7], %r4;
\tret;
"""
        assert run(code, [out], in_c=in_c) == []
        given = ((torch.arange(32) * 131073 + 65536).int()).view(torch.int16).reshape(8, 8)
        expected = given.T.contiguous() if swapped else given
        assert torch.equal(out[:32].view(torch.int16).reshape(8, 8), expected)


def test_one_lane_is_elected(in_c: bool) -> None:
    out = torch.full((32,), -1, dtype=torch.int32)
    code = """
\telect.sync \t%r2|%p1, -1;
\tselp.b32 \t%r3, 1, 0, %p1;
\tmul.wide.u32 \t%rd8, %r1, 4;
\tadd.s64 \t%rd7, %rd1, %rd8;
\tst.global.b32 \t[%rd7], %r3;
\tret;
"""
    assert run(code, [out], in_c=in_c) == []
    assert out.sum() == 1
    half = "\tsetp.lt.u32 \t%p2, %r1, 16;\n\t@%p2 elect.sync \t%r2|%p1, -1;\n\tret;"
    assert kinds(run(half, [out], in_c=in_c)) >= {"CONVERGENCE"}
