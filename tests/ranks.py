"""A test in several processes that form a process group over gloo, of our own or started by `accelerate launch`."""

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
# What the server imports that forks all processes, which then need not import it. It has no threads.
PRELOAD = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "attnscale.hf",
    "transformers.models.llama.modeling_llama",
]


def on_two_ranks(run: Callable[[int], Any], folder: Path) -> list[Any]:
    """What `run(rank)`, a function of a test file, returns in each of two processes that form a group."""
    return on_ranks(run, folder, RANKS)


def on_ranks(run: Callable[[int], Any], folder: Path, ranks: int) -> list[Any]:
    """The same in any number of processes."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    arguments = (inspect.getfile(run), run.__name__, str(folder), ranks)
    torch.multiprocessing.start_processes(_in_process, args=arguments, nprocs=ranks, start_method="forkserver")
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file) if file.exists() else None for file in files]  # None: it ended by itself


def by_accelerate(script: Path, folder: Path) -> list[Any]:
    """What a script, told the folder, saves in `0.pt` and `1.pt` when `accelerate launch` runs it in two processes."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    launcher = multiprocessing.get_context("forkserver").Process(target=_launch, args=(str(script), str(folder)))
    launcher.start()
    launcher.join()
    assert launcher.exitcode == 0, (folder / "launch.log").read_text()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _launch(script: str, folder: str) -> None:
    """`accelerate launch` in this process; the script asks for the CPU, as `--cpu` needs MPI for two processes."""
    import transformers.trainer  # here, and not in each of the processes that are forked  # noqa: F401
    from accelerate.commands import launch

    with Path(folder, "launch.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HOME": folder}  # where no configuration of accelerate's lies
    # Options of torchrun, which accelerate calls: processes are forked and run the script, importing nothing anew.
    os.environ |= {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
    sys.argv = ["accelerate", "--multi_gpu", "--num_processes", str(RANKS), "--main_process_port", "0", script, folder]
    launch.main()


def join(folder: Path | str, rank: int = 0, ranks: int = 1) -> None:
    """Let this process be a member of a group that meets in a file of the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = datetime.timedelta(seconds=120)  # a process that waits for another in vain fails, rather than hang
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=patience
    )


def group_threads() -> list[str]:
    """The threads that gloo runs in this process, by name (on Linux). They end with the last reference to a group."""
    names = (file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm"))
    return sorted(name for name in names if "gloo" in name)


def _in_process(rank: int, file: str, name: str, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    # By its file: test modules have names that only pytest can import.
    run = runpy.run_path(file)[name]
    join(folder, rank, ranks)
    os.environ["RANKS_FOLDER"] = folder  # for what a test writes
    try:
        torch.save(run(rank), f"{folder}/{rank}.pt")
    finally:
        # A DDP model that is freed after its group can hang. This process ends without freeing anything.
        gc.disable()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
