"""What a monitor reports: from the measured rows of all layers and processes to one `Record` per layer and head.

Listeners put what they measure into a `tally`; `collect` makes records of these, over all processes. Records and alerts
go to sinks and views; `record` also reads them back from a file. Imports `statistics` and `_util`, and no sink or view.
"""
