"""The ways to compute an `AttentionCall`, and the choice between them (`dispatch`).

`sdpa` folds β into the query and calls torch, and recognises calls that need no dispatch; `blockwise` is the row engine
of `statistics/rows`; `triton` runs the fused kernels; `reference` writes attention out and is the oracle of the tests.
None imports another: they share the protocols of `backend`. `self_check` compares the kernels with the oracle on a
device, and `trust` stores the result. May import `call`, `statistics` and `policies`.
"""
