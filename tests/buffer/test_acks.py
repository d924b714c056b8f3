"""What a turn accepts of one actor is acknowledged by one message; refusals by one each."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stillhouse.buffer.acks import acknowledged_together
from stillhouse.buffer.peers import Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.flow import acked_keys, concerns_caller

statuses = st.sampled_from(("accepted", "duplicate", "rejected"))
rollouts = st.sampled_from(("train-0-0-0", "train-0-1-0", "eval-1-0-0"))
acks = st.builds(
    Outgoing,
    st.just("actor"),
    st.sampled_from(("actor-0", "actor-1")),
    st.builds(m.SegmentAck, rollouts, st.integers(0, 5), statuses),
    st.just(()),
)
others = st.builds(
    Outgoing,
    st.sampled_from(("actor", "teacher")),
    st.sampled_from(("actor-0", "teacher-0")),
    st.builds(m.CancelRollout, rollouts, st.just("stale")),
    st.just(()),
)


def keys(outgoing: list[Outgoing]) -> Counter[tuple[str, object]]:
    return Counter({(out.name, key): 1 for out in outgoing for key in acked_keys(out.message)})


@given(st.lists(acks | others, max_size=30))
def test_the_same_is_acknowledged_in_fewer_messages(outgoing: list[Outgoing]) -> None:
    together = acknowledged_together(outgoing)
    assert keys(together) == keys(outgoing)
    taken = [out for out in outgoing if isinstance(out.message, m.SegmentAck) and out.message.status != "rejected"]
    merged = [out for out in together if isinstance(out.message, m.SegmentsAck)]
    assert sorted(out.name for out in merged) == sorted({out.name for out in taken})
    assert not any(concerns_caller(out.message) for out in merged)
    rest = [out for out in outgoing if out not in taken]
    assert [out for out in together if out not in merged] == rest, "refusals and all else: unchanged, in their order"
    for out in merged:  # none comes later than its first part would have
        assert isinstance(out.message, m.SegmentsAck)
        first = next(other for other in taken if other.name == out.name)
        after = outgoing[outgoing.index(first) + 1 :]
        assert [o for o in together[together.index(out) + 1 :] if o in rest] == [o for o in after if o in rest]
