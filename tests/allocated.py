"""What torch allocates on the CPU, as its profiler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that torch has allocated on the CPU after `run`, and most that it had meanwhile, both beyond what it had at
    the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    found: Any = seen.profiler
    live = most = 0
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return live, most
