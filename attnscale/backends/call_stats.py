"""Row statistics of a call from what a backend computed."""

from __future__ import annotations

from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.lengths import count_visible
from attnscale.statistics import RowStats, StatsRequest, largest_weight


def counted(call: AttentionCall) -> RowStats:
    """n of every row [B, H, Tq], and no other statistic yet."""
    visible = count_visible(call.context).expand(call.query.shape[:3])
    return RowStats(visible=visible, visible_given=call.context.visible is not None)


def softmax_stats(
    call: AttentionCall,
    request: StatsRequest,
    lse: Tensor,
    top: Tensor,
    entropy: Tensor,
    w_max: Tensor | None = None,
) -> RowStats:
    """The requested ones of the statistics that a forward gives, each [B, H, Tq]; `top` is the largest logit."""
    w_max = largest_weight(top, lse) if w_max is None else w_max
    stats = counted(call)._replace(lse=lse, max_logit=top, w_max=w_max, entropy=entropy)
    return stats.only(request)._replace(with_sink=call.sinks is not None and request.softmax)
