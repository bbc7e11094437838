"""The papers behind the temperature laws as code: closed forms beside simulators, and experiments that compare them.

One module per model: `families` (raw scores of known kinds), `condensation`, `gap_counting`, `simplex`, `phase` with
`bounds`, `sphere`. `experiments/` is what `attnscale theory NAME` runs. `import attnscale` imports none of it.
"""
