"""What one attention is asked to compute, before any temperature.

`layout` reads shapes and numbers, `parse` the keywords. `context` describes which keys each row may see, as intervals
of slots, and counts n and positions. `attention_call` holds the result, which every backend is given, and its one flat
form for operators. `torch_forms` translates or refuses what torch's function accepts beyond dense tensors. `tap`
connects a module to a monitor. Imports `errors` and `_util` only; data comes from `attnscale.attention` and goes to
`policies` (n → β) and `backends`.
"""
