"""What a monitor reports: from the measured rows of all layers and processes to one `Record` per layer and head.

Listeners put what they measure into tallies; `collect` makes records of these, over all processes. Records and alerts
go to sinks and views; `jsonl` reads them back from a file. Imports `statistics` and `_util`, and no sink or view.
"""
