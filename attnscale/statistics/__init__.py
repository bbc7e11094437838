"""Row statistics: requests, results, gap counts and Λ, and the torch implementation in `rows/`."""

from attnscale.statistics.request import StatsRequest, checked_request, sample_rows
from attnscale.statistics.row_stats import (
    AttentionOutput,
    RowPlaces,
    RowStats,
    Span,
    criticality,
    find_places,
    largest_weight,
)
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
