"""Rollouts that failed, as a run's launcher tells of them. The texts are escaped by the buffer."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.messages import Snapshot


def failures_text(snapshot: Snapshot | None) -> str:
    """How many, and the newest cause; empty when none has failed."""
    if snapshot is None or not snapshot.failures:
        return ""
    newest = snapshot.failures[-1]
    return f"{sum(each.n for each in snapshot.failures):,}, newest {newest.reason}: {newest.newest}"


class FailureNews:
    """The first failure under each reason is an event; later ones are in the status."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def news(self, snapshot: Snapshot) -> Iterator[str]:
        """What was not told before."""
        for each in snapshot.failures:
            if each.reason not in self._told:
                self._told.add(each.reason)
                yield f"a rollout failed ({each.reason}): {each.examples[0] if each.examples else each.newest}"
