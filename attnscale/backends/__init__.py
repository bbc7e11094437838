"""The ways to compute an `AttentionCall`, and the choice between them (`dispatch`).

`sdpa` folds β into the query and calls torch; `blockwise/` works in tiles and measures rows on the way; `triton` runs
the fused kernels; `reference` writes attention out and is the oracle of the tests. None imports another: what they
share is in `backend` (protocols), `autocast`, `call_stats`, `tiles` (how a call is cut), `tile_logits` and `gaps`.
`one_torch_call` recognises calls that need no dispatch. `self_check` compares the kernels with the oracle on a device,
and `trust` remembers what it found. May import `call`, `statistics` and `policies`.
"""
