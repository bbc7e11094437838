"""How people see records: flat names, the terminal view of a run, and `observe` for notebooks.

`display` holds every label, unit, scale, colour and explanation. Views import `records` and libraries for drawing, the
latter only where they draw; `observe` also starts a monitor, to have something to show.
"""
