"""The papers behind the temperature laws as code: closed forms beside simulators, and experiments that compare them.

One module per model: `families` (raw scores of known kinds), `condensation`, `gaps`, `simplex`, `phase`, `sphere`.
`experiments/` has what `attnscale theory NAME` runs. Nothing here is imported by `import attnscale`.
"""
