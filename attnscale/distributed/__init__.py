"""Attention in several processes: a sequence, or the heads of a module, spread over a `DeviceMesh`.

From `attention` and `module`, it makes the same numbers as one process; the README says how to choose.
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
