"""Events of a run: problems that the monitor recognises in its records.

`rules` recognises causes in the numbers of a report and the history of each head. `causes` holds the limits of the
rules, and the message and advice of each cause. `log` gives events their life: patience, grouping, consequences, end.
"""

from attnscale.diagnostics.events.causes import CAUSES, Thresholds
from attnscale.diagnostics.events.log import EventLog

__all__ = ["CAUSES", "EventLog", "Thresholds"]
