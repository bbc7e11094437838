"""Backends that compute an `AttentionCall`, and the choice between them (`dispatch`).

`sdpa` folds β into the query and calls torch's function; its fast path bypasses dispatch. `blockwise` is the row engine
of `statistics/rows`. `triton` runs the fused kernels. `reference` is an eager implementation and the oracle of the
tests. Backends do not import each other; they share the protocols in `backend`. `self_check` compares the kernels with
the oracle on a device, and `trust` caches the result. Imports `call`, `statistics` and `policies`.
"""
