"""The tile tables: the tile of each launch, that there is always one, and that no row or condition is unused."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnscale_kernels import Visibility
from attnscale_kernels.decode import launch as decode
from attnscale_kernels.flash import launch as flash
from attnscale_kernels.flash import plan
from attnscale_kernels.gaps import launch as gaps
from attnscale_kernels.launch import GFX_942, SM_80, SM_90, SM_100, Resources, Tile
from attnscale_kernels.tile_rules import TILES, TileRow, keeps_columns, tile_for, traits_of

DEVICES = {
    "sm_80": SM_80,
    "sm_89": SM_80._replace(shared_memory=101_376, capability=89),
    "sm_90": SM_90,
    "sm_100": SM_100,
    "gfx942": GFX_942,
}
WIDTHS = (16, 32, 64, 128, 256)

# By kernel, device and element size, without options, at 32, 64, 128 and 256 dimensions.
PLAIN = {
    ("forward", "sm_80", 2): "128x128x8x2 128x128x8x2 128x128x8x2 32x32x4x2",
    ("forward", "sm_89", 2): "128x128x8x2 128x128x8x2 128x64x8x2 32x32x4x2",
    ("forward", "sm_90", 2): "128x128x8x2 128x128x8x2 128x128x8x2 64x32x8x2",
    ("forward", "sm_100", 2): "128x128x8x2 128x128x8x2 128x128x8x2 64x32x8x2",
    ("forward", "gfx942", 2): "128x64x4x1 128x64x4x1r256 128x64x4x1 128x32x4x1",
    ("forward", "sm_80", 4): "64x32x8x1 64x32x8x1 32x16x8x1r128 16x16x4x1",
    ("forward", "gfx942", 4): "64x32x4x2 64x32x4x2 32x32x4x1 16x16x4x1",
    ("dQ", "sm_80", 2): "128x32x4x2 128x32x4x2 128x32x8x2 32x32x4x2",
    ("dQ", "sm_89", 2): "128x32x4x2 128x32x4x2 128x32x8x2 32x32x4x2",
    ("dQ", "sm_90", 2): "128x128x8x2 128x128x8x2 128x64x8x2 128x32x8x2",
    ("dQ", "sm_100", 2): "128x64x4x2r255 128x64x4x2r255 128x64x4x2r255 128x64x8x1",
    ("dQ", "gfx942", 2): "128x64x4x1r256 128x64x4x1r256 128x32x4x1 64x16x4x1",
    ("dQ", "sm_80", 4): "32x32x8x1 32x32x8x1 16x16x4x1r168 16x16x4x1",
    ("dQ", "gfx942", 4): "32x32x4x1 32x32x4x1 32x32x4x1 16x16x4x1",
    ("dK dV", "sm_80", 2): "64x128x8x2 32x128x8x2 32x64x4x2 32x32x4x1",
    ("dK dV", "sm_89", 2): "64x128x8x2 32x128x8x2 16x128x8x2 32x32x4x1",
    ("dK dV", "sm_90", 2): "64x128x8x3 64x128x8x3 32x128x8x3 32x32x4x1",
    ("dK dV", "sm_100", 2): "64x64x4x2 64x64x4x2 64x128x8x2 32x64x8x1",
    ("dK dV", "gfx942", 2): "16x128x4x1 32x128x4x1r256 32x128x4x1 16x64x4x1",
    ("dK dV", "sm_80", 4): "32x16x8x1 32x16x8x1 32x16x8x1 16x16x4x1",
    ("dK dV", "gfx942", 4): "32x16x4x1 32x16x4x1 32x16x4x1 16x16x4x1",
    ("decode", "sm_80", 2): "16x128x4x3r255 16x128x4x3r255 16x64x4x3r255 16x32x4x3r255",
    ("decode", "sm_89", 2): "16x128x4x3r255 16x128x4x3r255 16x64x4x3r255 16x32x4x3r255",
    ("decode", "sm_90", 2): "16x128x4x3r255 16x128x4x3r255 16x64x4x3r255 16x32x4x3r255",
    ("decode", "sm_100", 2): "16x128x4x3r255 16x128x4x3r255 16x64x4x3r255 16x32x4x3r255",
    ("decode", "gfx942", 2): "16x64x4x1 16x64x4x1 16x64x4x1 16x32x4x1",
    ("decode", "sm_80", 4): "16x32x4x2 16x32x4x2 16x16x4x1 16x16x8x1",
    ("decode", "gfx942", 4): "16x32x4x1 16x32x4x1 16x16x4x1 16x16x4x1",
    ("gaps", "sm_80", 2): "128x64x8x2 128x64x8x2 128x64x8x2 64x64x8x2",
    ("gaps", "sm_89", 2): "128x64x8x2 128x64x8x2 128x64x8x2 64x64x8x2",
    ("gaps", "sm_90", 2): "128x64x8x2 128x64x8x2 128x64x8x2 64x64x8x2",
    ("gaps", "sm_100", 2): "128x64x8x2 128x64x8x2 128x64x8x2 64x64x8x2",
    ("gaps", "gfx942", 2): "128x64x4x1 128x64x4x1 128x64x4x1 64x32x4x1",
    ("gaps", "sm_80", 4): "32x32x8x1 32x32x8x1 16x16x8x1 16x16x8x1",
    ("gaps", "gfx942", 4): "64x32x4x1 64x32x4x1 32x32x4x1 16x16x4x1",
}

# In half precision by kernel, options and width, for the devices in order; TMA descriptors where supported.
WITH_OPTIONS = {
    ("forward", "boxed", 64): "128x128x8x3 128x128x4x2",
    ("forward", "boxed", 128): "128x128x8x2 128x128x4x2",
    ("forward", "boxed", 256): "128x64x8x2 128x64x8x2",
    ("forward", "boxed busy", 64): "128x64x8x3 128x64x8x3",
    ("forward", "boxed busy", 128): "128x64x8x2 128x64x8x2",
    ("forward", "boxed busy", 256): "64x32x8x2 64x32x8x2",
    ("forward", "boxed masked", 64): "128x128x8x3 128x128x8x3",
    ("forward", "boxed masked", 128): "128x128x8x2 128x128x8x2",
    ("forward", "boxed masked", 256): "128x64x8x2 128x64x8x2",
    ("forward", "busy", 64): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("forward", "busy", 128): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("forward", "busy", 256): "32x32x4x2 32x32x4x2 64x32x8x2 64x32x8x2 64x32x4x1",
    ("forward", "masked busy", 64): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("forward", "masked busy", 128): "128x32x8x2 128x32x8x2 128x32x8x2 128x32x8x2 128x64x4x1",
    ("forward", "masked busy", 256): "32x32x4x2 32x32x4x2 64x32x8x2 64x32x8x2 64x32x4x1",
    ("forward", "dropout busy", 64): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("forward", "dropout busy", 128): "128x32x8x2 128x32x8x2 128x32x8x2 128x32x8x2 128x64x4x1",
    ("forward", "dropout busy", 256): "32x32x4x2 32x32x4x2 64x32x8x2 64x32x8x2 64x32x4x1",
    ("forward", "masked dropout busy", 64): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("forward", "masked dropout busy", 128): "128x32x8x2 128x16x8x2 128x32x8x2 128x32x8x2 128x64x4x1",
    ("forward", "masked dropout busy", 256): "32x32x4x2 32x32x4x2 64x32x8x2 64x32x8x2 64x32x4x1",
    ("forward", "entropy", 64): "128x128x8x2 128x128x8x2 128x128x8x2 128x128x8x2 128x64x4x1r256",
    ("forward", "entropy", 128): "128x128x8x3 128x64x8x2 128x128x8x3 128x128x8x3 128x64x4x1",
    ("forward", "entropy", 256): "32x32x4x2 32x32x4x2 64x32x8x2 64x32x8x2 128x32x4x1",
    ("dQ", "boxed", 128): "128x64x4x2r255",
    ("dQ", "boxed busy", 128): "128x128x8x2",
    ("dQ", "dropout", 64): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("dQ", "dropout", 128): "128x16x8x2 128x16x8x2 128x32x8x2 128x32x8x2 128x32x4x1",
    ("dQ", "dropout", 256): "32x32x4x2 32x32x4x2 32x32x4x2 64x32x4x1 64x16x4x1",
    ("dQ", "biased", 64): "128x64x8x2 128x64x8x2 128x64x8x2 128x64x8x2 128x64x4x1",
    ("dQ", "biased", 128): "128x32x8x2 128x32x8x2 128x64x8x2 128x64x8x2 128x32x4x1",
    ("dQ", "biased", 256): "32x32x4x2 32x32x4x2 32x32x4x2 64x32x4x1 64x16x4x1",
    ("dQ", "busy", 64): "128x32x4x2 128x32x4x2 128x128x8x2 128x64x4x2r255 128x64x4x1",
    ("dQ", "busy", 128): "128x32x8x2 128x32x8x2 128x64x8x2 128x64x8x2 128x32x4x1",
    ("dQ", "busy", 256): "32x32x4x2 32x32x4x2 32x32x4x2 64x32x4x1 64x16x4x1",
    ("dK dV", "padded", 64): "32x128x8x2 32x128x8x2 64x128x8x3 64x64x4x2 32x128x4x1",
    ("dK dV", "padded", 128): "16x128x8x1 16x128x8x1 32x128x8x3 64x128x8x2 16x128x4x2",
    ("dK dV", "padded", 256): "32x32x4x1 32x32x4x1 32x32x4x1 32x64x8x1 16x64x4x1",
    ("dK dV", "bounded", 64): "32x128x8x2 32x128x8x2 64x128x8x3 64x64x4x2 32x128x4x1r256",
    ("dK dV", "bounded", 128): "16x128x8x2 16x128x8x2 32x128x8x3 64x128x8x2 16x128x4x2",
    ("dK dV", "bounded", 256): "32x32x4x1 32x32x4x1 32x32x4x1 32x64x8x1 16x64x4x1",
    ("dK dV", "dropout", 64): "32x128x8x2 32x128x8x2 32x64x4x2 32x64x4x2r168 32x128x4x1",
    ("dK dV", "dropout", 128): "16x128x8x2 16x128x8x2 16x128x8x3 32x128x8x2 16x128x4x1",
    ("dK dV", "dropout", 256): "32x32x4x1 32x32x4x1 32x32x4x1 32x64x8x1 16x64x4x1",
    ("dK dV", "busy", 64): "32x128x8x2 32x128x8x2 32x64x4x2 64x64x4x2 32x128x4x1",
    ("dK dV", "busy", 128): "16x128x8x2 16x128x8x2 32x128x8x2 64x128x8x2 16x128x4x2",
    ("dK dV", "busy", 256): "32x32x4x1 32x32x4x1 32x32x4x1 32x64x8x1 16x64x4x1",
    ("decode", "many_rows", 128): "32x64x8x3r255 32x64x8x3r255 32x64x8x3r255 32x64x8x3r255 32x64x4x1",
    ("gaps", "biased", 128): "128x32x8x2 128x32x8x2 128x32x8x2 128x32x8x2 128x64x4x1",
}


def short(tile: Tile) -> str:
    """A tile as in the tables below: rows, keys, warps, stages and registers."""
    return "x".join(map(str, tile[:4])) + (f"r{tile.registers}" if tile.registers else "")


@pytest.mark.parametrize(("kernel", "device", "size"), PLAIN)
def test_launches_without_options_take_the_tile_of_their_width(kernel: str, device: str, size: int) -> None:
    found = [short(tile_for(kernel, width, size, DEVICES[device])) for width in WIDTHS[1:]]

    assert found == PLAIN[kernel, device, size].split()


@pytest.mark.parametrize(("kernel", "options", "width"), WITH_OPTIONS)
def test_options_change_the_tile(kernel: str, options: str, width: int) -> None:
    given = dict.fromkeys(options.split(), True)
    devices = [device for device in DEVICES.values() if "boxed" not in given or takes_boxes(kernel, device)]

    assert [short(tile_for(kernel, width, 2, device, **given)) for device in devices] == (
        WITH_OPTIONS[kernel, options, width].split()
    )


def takes_boxes(kernel: str, device: Resources) -> bool:
    return device.has_tensor_memory if kernel == "dQ" else device.copies_boxes


def words(kernel: str) -> set[str]:
    """Options in the rows of a kernel."""
    given = {word.removeprefix("!") for row in TILES[kernel] for word in row.when.split()}
    return given - {"amd", "tensor_memory", "large", "small"}


@pytest.mark.parametrize("kernel", TILES)
def test_every_launch_has_a_tile_and_every_row_a_launch(kernel: str) -> None:
    options, taken = sorted(words(kernel)), set()
    for device, size, width in itertools.product(DEVICES.values(), (2, 4), WIDTHS):
        for chosen in itertools.product((False, True), repeat=len(options)):
            given = {name for name, is_given in zip(options, chosen, strict=True) if is_given}
            if "boxed" in given and not (size == 2 and takes_boxes(kernel, device)):
                continue
            every = frozenset({*given, *traits_of(device)})
            row = next(row for row in TILES[kernel] if row.applies(size, width, every))
            assert row.tile == tile_for(kernel, width, size, device, **dict.fromkeys(given, True))
            taken.add(row)

    idle: list[TileRow] = [row for row in TILES[kernel] if row not in taken]
    assert idle == []
    assert all(row.reason for row in TILES[kernel])


def test_the_options_of_the_tables_are_those_that_launches_give(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, set[str]] = {}

    def recorded(kernel: str, *arguments: object, **options: bool) -> Tile:
        given[kernel] = set(options)
        return tile_for(kernel, *arguments, **options)

    q, beta, causal = torch.zeros(1, 1, 4, 16), torch.ones(1, 1, 4), Visibility(right=0)
    for module in (plan, decode, gaps):
        monkeypatch.setattr(module, "tile_for", recorded)
    monkeypatch.setattr("attnscale_kernels.state.LAUNCHES", {})
    flash.forward_launches(q, q, q, beta, causal, scale=0.25)
    flash.backward_launches(q, q, q, q, beta, causal, q, beta, scale=0.25)
    decode.decode_launches(q, q, q, beta, causal, scale=0.25)
    gaps.bracket_launches(q, q, causal, scale=0.25)

    assert given == {kernel: words(kernel) for kernel in TILES}


def test_rows_are_columns_where_a_mask_would_spread_them_over_threads() -> None:
    aligned = torch.ones(1, 2, 8, 32, dtype=torch.bool)
    unaligned, shared = aligned[..., :9].contiguous(), torch.ones(9, dtype=torch.bool).expand(1, 1, 8, 9)

    assert [keeps_columns(mask, SM_80) for mask in (None, aligned, unaligned, shared)] == [False, False, True, False]
    assert not any(keeps_columns(unaligned, resources) for resources in (SM_90, SM_100))
    assert keeps_columns(aligned, GFX_942)
    assert not keeps_columns(None, GFX_942)
