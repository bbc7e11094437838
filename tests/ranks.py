"""Tests in several processes that form a gloo process group, started here or by `accelerate launch`."""

from __future__ import annotations

import datetime
import gc
import inspect
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RANKS = 2
# Imported once by the fork server, so that forked processes need not import it. It has no threads.
PRELOAD = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "attnscale.hf",
    "transformers.models.llama.modeling_llama",
]


def on_two_ranks(run: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return the results of `run(rank)`, a function of a test file, in two processes that form a group."""
    return on_ranks(run, folder, RANKS)


def on_ranks(run: Callable[[int], Any], folder: Path, ranks: int) -> list[Any]:
    """`on_two_ranks` for any number of processes."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    arguments = (inspect.getfile(run), run.__name__, str(folder), ranks)
    torch.multiprocessing.start_processes(_in_process, args=arguments, nprocs=ranks, start_method="forkserver")
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file) if file.exists() else None for file in files]  # None: it ended by itself


def by_accelerate(script: Path, folder: Path) -> list[Any]:
    """Return what a script saves in `0.pt` and `1.pt` of a folder when `accelerate launch` runs it in two processes."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    launcher = multiprocessing.get_context("forkserver").Process(target=_launch, args=(str(script), str(folder)))
    launcher.start()
    launcher.join()
    assert launcher.exitcode == 0, (folder / "launch.log").read_text()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _launch(script: str, folder: str) -> None:
    """`accelerate launch` in this process; the script selects the CPU, as `--cpu` requires MPI for two processes."""
    import transformers.trainer  # here, and not in each of the processes that are forked  # noqa: F401
    from accelerate.commands import launch

    with Path(folder, "launch.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HOME": folder}  # a folder without an accelerate configuration
    # Options of torchrun, which accelerate calls: processes are forked and import nothing again.
    os.environ |= {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
    sys.argv = ["accelerate", "--multi_gpu", "--num_processes", str(RANKS), "--main_process_port", "0", script, folder]
    launch.main()


def join(folder: Path | str, rank: int = 0, ranks: int = 1) -> None:
    """Join a process group that meets in a file of the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = datetime.timedelta(seconds=120)  # a process that waits in vain fails instead of hanging
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=patience
    )


def group_threads() -> list[str]:
    """The names of the gloo threads of this process (Linux only). They end with the last reference to a group."""
    names = (file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm"))
    return sorted(name for name in names if "gloo" in name)


def _in_process(rank: int, file: str, name: str, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    # By file: the names of test modules are importable by pytest only.
    run = runpy.run_path(file)[name]
    join(folder, rank, ranks)
    os.environ["RANKS_FOLDER"] = folder  # folder for test output
    try:
        torch.save(run(rank), f"{folder}/{rank}.pt")
    finally:
        # A DDP model freed after its group can hang. This process exits without freeing anything.
        gc.disable()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
