"""Records: one `Record` per layer and head from the measured rows of all layers and processes.

`tally` sums the measurements of the listeners and merges them over all processes. `record` defines records and alerts
and reads them from files. Imports `statistics` and `_util`, and no sink or view.
"""
