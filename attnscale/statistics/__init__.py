"""Row statistics: what can be asked for and what comes back (`row_stats`), gaps and Λ (`gaps`), and `rows/`."""

from attnscale.statistics.row_stats import (
    AttentionOutput,
    RowStats,
    StatsRequest,
    checked_request,
    criticality,
    largest_weight,
    row_statistics,
    sample_rows,
)

__all__ = [
    "AttentionOutput",
    "RowStats",
    "StatsRequest",
    "checked_request",
    "criticality",
    "largest_weight",
    "row_statistics",
    "sample_rows",
]
