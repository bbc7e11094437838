"""Execution of a grid in numpy: its programs one after the other, and the warps of each up to barriers; see grid.c."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiled.execution import Settings
from compiled.launching import Map
from compiled.memory import Findings, GlobalMemory, SharedMemory
from compiled.ptx.encode import LANES, Encoded
from compiled.ptx.interpret import ALL, Block, Warp
from compiled.ptx.products import Products

Array = np.ndarray


def interpret(
    encoded: Encoded,
    memory: GlobalMemory,
    shared: SharedMemory,
    findings: Findings,
    counts: Array,
    budget: int,
    warps: int,
    grid: int,
    settings: Settings,
    maps: Sequence[Map],
) -> None:
    """Run the programs of a grid."""
    programs = range(grid)[:: -1 if settings.reverse else 1]
    order = range(warps)[:: -1 if settings.reverse else 1]
    with np.errstate(all="ignore"):
        for program in programs:
            shared.start_block(settings.poison)
            block = Block(encoded, memory, shared, findings, counts, budget, warps, maps)
            block.at.program = program
            running = [Warp(encoded.start.copy(), {0: ALL.copy()}) for _ in range(warps)]
            for number, warp in enumerate(running):
                warp.file[encoded.thread] = 32 * number + np.arange(LANES)
                warp.file[encoded.program] = program
                warp.products = Products(len(encoded.start)) if encoded.asynchronous else None
            while _run_epoch(block, running, order):
                pass
    shared.further = None


def _run_epoch(block: Block, running: Sequence[Warp], order: Sequence[int]) -> bool:
    """Run all warps until they end or meet at a barrier; return whether the block goes on."""
    for warp in running:
        warp.waiting = -1
    blocked = list(order)
    while blocked:
        before, tried, blocked = block.budget, blocked, []
        for number in tried:
            warp = running[number]
            if not warp.paths or warp.waiting >= 0:
                continue
            warp.blocked = -1
            block.run_warp(warp, number)
            if warp.paths and warp.blocked >= 0:
                blocked.append(number)
        if blocked and before == block.budget:
            block.at.place, block.at.warp = running[blocked[-1]].blocked, blocked[-1]
            block.at.report("NEVER_DONE", -1, 0)
            return False
    met = [number for number in order if running[number].waiting >= 0]
    if met and (len(met) != len(running) or len({running[number].waiting for number in met}) > 1):
        block.at.place, block.at.warp = running[met[-1]].waiting, met[-1]
        block.at.report("BARRIER", -1, len(met))
        return False
    if block.further is not None:
        block.groups.end_traces()
        if not met:
            block.boxes.report_left(running)
        block.further.settle(block.shared.c.epoch)
    block.shared.c.epoch += 1
    return bool(met)
