"""Context and tensor parallelism: a sequence, or the heads of a module, sharded over a `DeviceMesh`.

Uses `attention` and `module`. Results equal those of a single process. The README compares the methods.
"""

from attnscale.distributed.context_parallel import context_parallel_attention
from attnscale.distributed.shards import TokenShards
from attnscale.distributed.styles import ContextParallel, HeadParallel, shard_policies, share_rows

__all__ = [
    "ContextParallel",
    "HeadParallel",
    "TokenShards",
    "context_parallel_attention",
    "shard_policies",
    "share_rows",
]
