"""Encoding of the instructions of sm_90: matrix products of a warpgroup, bulk copies, and what orders them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from compiled.ptx.parse import Instruction, Literal, Operand, Pair, Place, Register, Vector

if TYPE_CHECKING:
    from compiled.ptx.encode import Encoder

SPECIAL = (
    "ELECT", "STORE_MATRICES", "PRODUCT", "PRODUCT_FENCE", "PRODUCT_COMMIT", "PRODUCT_WAIT", "PROXY_FENCE",
    "OBJECT_START", "OBJECT_END", "OBJECT_EXPECT", "OBJECT_WAIT", "COPY_BOX",
)  # fmt: skip

# Flags of a product.
FACTOR_IN_REGISTERS, TRANSPOSED_A, TRANSPOSED_B, NEGATIVE_A, NEGATIVE_B = 1, 2, 4, 8, 16

_PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(16|8)\.f32\.(?:bf16\.bf16|f16\.f16|tf32\.tf32)$")
_KINDS = {"bf16": 0, "f16": 1, "tf32": 2}
_STORED = re.compile(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16$")
_PLAIN = {
    "wgmma.fence.sync.aligned": "OP_PRODUCT_FENCE",
    "wgmma.commit_group.sync.aligned": "OP_PRODUCT_COMMIT",
    "fence.proxy.async.shared::cta": "OP_PROXY_FENCE",
}
_COPY = re.compile(r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cta\.global\.mbarrier::complete_tx::bytes$")


def encode_asynchronous(encoder: Encoder, instruction: Instruction) -> bool:
    """Encode an instruction of sm_90; return whether it is one."""
    opcode = instruction.opcode
    if found := _PRODUCT.match(opcode):
        _product(encoder, instruction, int(found[1]), int(found[2]))
    elif found := _STORED.match(opcode):
        address, vector = encoder.expect(instruction, 2)
        rows = encoder.vector(vector, int(found[1]), 32)
        encoder.emit("OP_STORE_MATRICES", instruction, rows, [len(rows), bool(found[2])], *_address(encoder, address))
    elif opcode in _PLAIN:
        encoder.expect(instruction, 0)
        encoder.emit(_PLAIN[opcode], instruction, [])
    elif opcode == "wgmma.wait_group.sync.aligned":
        (count,) = encoder.expect(instruction, 1)
        encoder.emit("OP_PRODUCT_WAIT", instruction, [], [_number(encoder, count)])
    elif opcode == "elect.sync":
        results, members = encoder.expect(instruction, 2)
        lane, chosen = _pair(encoder, results)
        rows = [encoder.register(lane, 32), encoder.register(chosen, 1), encoder.source(members, 32)]
        encoder.emit("OP_ELECT", instruction, rows)
    elif opcode.startswith("mbarrier."):
        return _object(encoder, instruction)
    elif found := _COPY.match(opcode):
        _copy(encoder, instruction, int(found[1]))
    else:
        return False
    return True


def _product(encoder: Encoder, instruction: Instruction, columns: int, depth: int) -> None:
    kind = _KINDS[instruction.opcode.rsplit(".", 1)[1]]
    if columns % 8 or not 8 <= columns <= 256 or depth != (8 if kind == 2 else 16):
        raise encoder.error(f"unknown instruction {instruction.opcode}")
    transposes = 0 if kind == 2 else 1 if isinstance(instruction.operands[1], Vector) else 2
    result, a, b, scaled, *signs = encoder.expect(instruction, 6 + transposes)
    flags = 0
    lists = encoder.vector(result, columns // 2, 32)
    rows = [encoder.source(scaled, 1), 0, encoder.register(b, 64)]
    if isinstance(a, Vector):
        flags |= FACTOR_IN_REGISTERS
        lists += encoder.vector(a, 4, 32)
    else:
        rows[1] = encoder.register(a, 64)
    for operand, flag in zip(signs, (NEGATIVE_A, NEGATIVE_B), strict=False):
        sign = _number(encoder, operand)
        if sign not in (1, -1):
            raise encoder.error(f"a factor with sign {sign}")
        flags |= flag if sign < 0 else 0
    for operand, flag in zip(signs[:1:-1], (TRANSPOSED_B, TRANSPOSED_A), strict=False):
        transposed = _number(encoder, operand)
        if transposed not in (0, 1):
            raise encoder.error(f"a factor that is transposed by {transposed}")
        flags |= flag if transposed else 0
    encoder.emit("OP_PRODUCT", instruction, rows, [kind, columns, flags, len(encoder.lists)])
    encoder.lists += lists


def _object(encoder: Encoder, instruction: Instruction) -> bool:
    """Instructions on a barrier object in shared memory."""
    opcode = instruction.opcode
    if opcode == "mbarrier.init.shared::cta.b64":
        at, count = encoder.expect(instruction, 2)
        encoder.emit("OP_OBJECT_START", instruction, [encoder.source(count, 32)], [], *_address(encoder, at))
    elif opcode == "mbarrier.inval.shared::cta.b64":
        (at,) = encoder.expect(instruction, 1)
        encoder.emit("OP_OBJECT_END", instruction, [], [], *_address(encoder, at))
    elif opcode == "mbarrier.arrive.expect_tx.shared::cta.b64":
        state, at, size = encoder.expect(instruction, 3)
        if state != Register("_"):
            raise encoder.error("the state of an arrival")
        encoder.emit("OP_OBJECT_EXPECT", instruction, [encoder.source(size, 32)], [], *_address(encoder, at))
    elif opcode == "mbarrier.try_wait.parity.shared::cta.b64":
        done, at, parity = encoder.expect(instruction, 3)
        rows = [encoder.register(done, 1), encoder.source(parity, 32)]
        encoder.emit("OP_OBJECT_WAIT", instruction, rows, [], *_address(encoder, at))
    else:
        return False
    return True


def _copy(encoder: Encoder, instruction: Instruction, rank: int) -> None:
    to, place, barrier = encoder.expect(instruction, 3)
    if not isinstance(place, Place):
        raise encoder.error(f"a map and coordinates are expected instead of {place}")
    offset, base = _address(encoder, to)
    further, signal = _address(encoder, barrier)
    if further:
        raise encoder.error("a barrier with an offset")
    rows = [encoder.register(place.map, 64), signal, *encoder.vector(place.coordinates, rank, 32)]
    encoder.emit("OP_COPY_BOX", instruction, rows, [rank], offset, base)


def _address(encoder: Encoder, operand: Operand) -> tuple[int, int]:
    """Offset and row of an address in shared memory."""
    base, offset = encoder.address(operand, 32)
    return offset, base


def _number(encoder: Encoder, operand: Operand) -> int:
    if not isinstance(operand, Literal) or operand.kind != "int":
        raise encoder.error(f"a number is expected instead of {operand}")
    return operand.value


def _pair(encoder: Encoder, operand: Operand) -> Pair:
    if not isinstance(operand, Pair):
        raise encoder.error(f"two results are expected instead of {operand}")
    return operand
