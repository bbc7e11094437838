"""What one attention is asked to compute, before any temperature.

`layout` reads shapes, `parse` the keywords, into a `Context`: which keys each row may see, as intervals of slots.
`lengths` counts n and positions from it; `attention_call` holds the result that every backend is given. `causal_bias`,
`nested` and `context_parallel` translate or refuse what torch's function accepts beyond dense tensors, `tap` is where a
monitor listens. Imports `errors` and `_util` only; data comes from `attnscale.attention` and goes to `policies` (n → β)
and `backends`.
"""
