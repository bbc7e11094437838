"""Events of a run: problems that the monitor recognises in its records.

`signals` holds the numbers that the rules read, with the history of each head. `rules` defines every cause: its rule,
its message and what to try. `log` gives events their life: patience, grouping, consequences, end. `actions` are
callbacks for `Monitor(on_alert=...)`.
"""

from attnscale.diagnostics.events.log import EventLog
from attnscale.diagnostics.events.rules import CAUSES
from attnscale.diagnostics.events.thresholds import Thresholds

__all__ = ["CAUSES", "EventLog", "Thresholds"]
