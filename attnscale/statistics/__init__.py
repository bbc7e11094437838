"""Row statistics: what can be asked for, what comes back, gaps and Λ, and `rows/`, which computes them in torch."""

from attnscale.statistics.request import StatsRequest, checked_request
from attnscale.statistics.row_places import RowPlaces, Span, find_places
from attnscale.statistics.row_stats import AttentionOutput, RowStats, criticality, largest_weight
from attnscale.statistics.sampling import sample_rows
from attnscale.statistics.score_matrix import row_statistics

__all__ = [
    "AttentionOutput",
    "RowPlaces",
    "RowStats",
    "Span",
    "StatsRequest",
    "checked_request",
    "criticality",
    "find_places",
    "largest_weight",
    "row_statistics",
    "sample_rows",
]
