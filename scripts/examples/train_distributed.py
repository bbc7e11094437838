"""Train a tiny model in several processes, in one of four ways; the loss equals that of a single process.

python scripts/examples/train_distributed.py --steps 20          # one process; gloo on CPU, nccl on GPUs
torchrun --nproc-per-node 2 scripts/examples/train_distributed.py --parallel cp --method ring   # ddp, fsdp, tp
"""

import argparse
import gc
import os

import torch
from rich.progress import track
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attnscale import ScaledDotProductAttention
from attnscale.distributed import ContextParallel, HeadParallel

VOCABULARY, LENGTH, PERIOD, BATCH, WIDTH, HEADS = 64, 128, 16, 8, 64, 8


class Model(nn.Module):  # one attention; separate q, k and v for tensor parallelism over heads
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.attention = ScaledDotProductAttention("ssmax", num_heads=HEADS, reference_length=LENGTH)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x: Tensor = self.token(tokens) + self.place(places)
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        spread = {} if self.attention.spread is None else {"positions": places}  # n counts keys of the whole sequence
        return self.head(x + self.o(self.attention(q, k, v, is_causal=True, **spread).transpose(1, 2).flatten(2)))


def spread(model: Model, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    if options.parallel == "tp":
        plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
        return parallelize_module(model, mesh, {**plan, "attention": HeadParallel()})
    if options.parallel == "cp":  # gradients are averaged as in ddp
        parallelize_module(model, mesh, {"attention": ContextParallel(method=options.method)})
    if options.parallel == "fsdp":
        fully_shard(model, mesh=mesh)
    return model if options.parallel == "fsdp" else nn.parallel.DistributedDataParallel(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model in several processes.")
    parser.add_argument("--parallel", default="ddp", choices=("ddp", "fsdp", "tp", "cp"))
    parser.add_argument("--method", default="gather", choices=("gather", "ulysses", "ring"), help="of context parallel")
    parser.add_argument("--steps", type=int, default=100)
    options, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"} | os.environ)
    if BATCH % (size := int(os.environ["WORLD_SIZE"])):
        parser.error(f"WORLD_SIZE={size} is not accepted: expected 1, 2, 4 or 8, which divide batch, heads and tokens")
    mesh, _ = init_device_mesh(device, (size,), mesh_dim_names=(options.parallel,)), torch.manual_seed(0)
    rank, places = mesh.get_local_rank(), torch.arange(LENGTH, device=device)
    model = spread(Model().to(device), mesh, options)
    rows = slice(rank, None, size) if options.parallel in ("ddp", "fsdp") else slice(None)
    if options.parallel == "cp":  # one chunk from the start and one from the end, to balance the work
        places = places.view(2 * size, -1)[[rank, 2 * size - 1 - rank]].flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for _ in track(range(options.steps), f"{options.parallel}, {size} processes", disable=rank > 0):
        tokens = torch.randint(VOCABULARY, (BATCH, PERIOD)).repeat(1, LENGTH // PERIOD + 1).to(device)[rows]
        loss = nn.functional.cross_entropy(model(tokens[:, places], places).mT, tokens[:, places + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    distributed.all_reduce(mean := loss.detach())
    if rank == 0:
        print(f"{options.parallel}, {size} processes: loss {mean.item() / size:.4f} in step {options.steps}")


if __name__ == "__main__":
    main()
    gc.collect()  # a DDP model that outlives the process group can hang: it joins the group's threads under the GIL
    distributed.destroy_process_group()
