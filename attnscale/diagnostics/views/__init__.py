"""Views of records: flat names, the terminal view of a run, and `observe` for notebooks.

`display` defines labels, units, scales, colours and explanations. Views import `records`, and plotting libraries only
inside the functions that draw. `observe` also runs a monitor.
"""
