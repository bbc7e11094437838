"""Arguments of one attention call, before any temperature.

`torch_arguments` parses the arguments shared with torch's function, `parse` the other keywords. `context` describes the
visible keys of each row as intervals of slots, and counts n and positions. `attention_call` holds the parsed call,
which every backend receives, and its flat form for operators. `tap` connects a module to a monitor. Imports `errors`
and `_util` only. Data comes from `attnscale.attention` and goes to `policies` (n → β) and `backends`.
"""
