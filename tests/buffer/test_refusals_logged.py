"""What the core refuses is answered to its sender; the same answers become lines of the buffer's log."""

from __future__ import annotations

import pytest

from stillhouse.buffer.loop import refusal_in
from stillhouse.protocol import messages as m


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (m.SegmentAck("train-0-0-0", 3, "rejected", "nan_logprob"), "segment 3 of train-0-0-0: nan_logprob"),
        (m.SegmentAck("train-0-0-0", 3, "accepted"), ""),
        (m.ScoresAck((7, 8), ("accepted", "rejected"), (None, "nan_score")), "scores of leases 8: nan_score"),
        (m.ScoresAck((7,), ("expired",), (None,)), ""),
        (m.Refused("malformed", "a task", "0", "1 or more"), "malformed: a task; got 0, expected 1 or more"),
        (m.HeartbeatReply(m.WeightVersion(0, 0)), ""),
    ],
)
def test_a_refusal_says_what_and_why(message: m.Message, line: str) -> None:
    assert refusal_in(message) == line
