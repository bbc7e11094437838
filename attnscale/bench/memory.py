"""The peak of what torch's allocator holds on the CPU while a function runs."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from attnscale._util.scratch import forget


def peak_bytes(function: Callable[[], object]) -> int:
    """The largest sum of CPU allocations alive at once, from the profiler's record of every one.

    >>> import torch
    >>> peak_bytes(lambda: torch.empty(1024, dtype=torch.float32))
    4096
    """
    function()
    forget()  # buffers that inference keeps from call to call belong to its memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    if record.profiler is None or record.profiler.kineto_results is None:
        raise RuntimeError("the profiler kept no record")
    held = peak = 0
    events = record.profiler.kineto_results.events()
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.device_type().name == "CPU":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
