"""Who is let in: the checks of a Hello. No I/O: the server asks, and answers the peer."""

from __future__ import annotations

import re
from collections import deque
from typing import Final

from protocol.messages import PROTOCOL_VERSION, Hello, Refused
from protocol.session import PeerId

REMEMBERED_INCARNATIONS: Final = 16
"""Of one peer: the newest, and those before it, which must not come back."""
REMEMBERED_PEERS: Final = 4096
"""Of which incarnations are known. Who makes up names cannot fill the memory: the peer admitted longest ago is
forgotten first."""
_LONGEST: Final = 100
"""Characters of a name."""
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST}}}")


class Doorkeeper:
    """Knows which run this is, which vocabulary it has, and who was replaced by whom.

    `vocab_fingerprint` None: that of the learner becomes the run's. Until it comes nobody else's counts.
    """

    def __init__(self, *, run_id: str, vocab_fingerprint: str | None) -> None:
        self._run_id = run_id
        self._vocab_fingerprint = vocab_fingerprint or ""
        self._admitted: dict[PeerId, deque[str]] = {}
        """The newest incarnation of each peer last, there or not; before it those that it has replaced."""

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def vocab_fingerprint(self) -> str:
        """The run's; empty while it is not known."""
        return self._vocab_fingerprint

    def incarnations(self) -> list[tuple[PeerId, list[str]]]:
        """Of each peer, all but the last of which must not come back; the peer admitted last is last."""
        return [(peer, list(incarnations)) for peer, incarnations in self._admitted.items()]

    def restore(self, vocab_fingerprint: str, incarnations: list[tuple[PeerId, list[str]]]) -> None:
        """What another process of the buffer knew."""
        self._vocab_fingerprint = self._vocab_fingerprint or vocab_fingerprint
        self._admitted = {peer: deque(names, maxlen=REMEMBERED_INCARNATIONS) for peer, names in incarnations}

    def admitted(self, hello: Hello) -> None:
        """This peer was let in. Its former incarnation is replaced for good, also when it had fallen silent before: a
        Hello of the dead may be on its way still, and must not put the living out."""
        if hello.role == "learner":
            self._vocab_fingerprint = self._vocab_fingerprint or hello.vocab_fingerprint
        peer = PeerId(hello.role, hello.name)
        incarnations = self._admitted.pop(peer, None) or deque[str](maxlen=REMEMBERED_INCARNATIONS)
        if hello.incarnation not in incarnations:
            incarnations.append(hello.incarnation)
        self._admitted[peer] = incarnations  # the newest is last
        if len(self._admitted) > REMEMBERED_PEERS:
            del self._admitted[next(iter(self._admitted))]

    def misreads(self, hello: Hello) -> bool:
        """Whether this peer has another vocabulary than the run."""
        return bool(hello.vocab_fingerprint) and self._vocab_fingerprint not in ("", hello.vocab_fingerprint)

    def objection(self, hello: Hello) -> Refused | None:
        """Why not to let this peer in."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return wrong_version(hello.protocol_version)
        asks = hello.role == "launcher" and not hello.run_id
        if hello.run_id != self._run_id and not asks:
            return Refused("run_id", "this buffer belongs to another run", hello.run_id, self._run_id)
        fits = 1 <= len(hello.incarnation) <= _LONGEST and len(hello.pool) <= _LONGEST and hello.received_total >= 0
        if not fits or not _NAME.fullmatch(hello.name):
            got = f"name {hello.name[:100]!r}, incarnation {hello.incarnation[:100]!r}, {hello.received_total} received"
            expected = f"a name like {_NAME.pattern}, an incarnation and a pool of at most {_LONGEST}, a count"
            return Refused("malformed", "not a peer's identity", got, expected)
        if not hello.vocab_fingerprint and hello.role != "launcher":
            return Refused("vocab_fingerprint", f"a {hello.role} works on token ids", "", "a vocabulary fingerprint")
        if self.misreads(hello):
            message = "another token-to-id map than the run's: the same ids would mean other text"
            return Refused("vocab_fingerprint", message, hello.vocab_fingerprint, self._vocab_fingerprint)
        peer = PeerId(hello.role, hello.name)
        known = self._admitted.get(peer)
        if known is not None and hello.incarnation in known and hello.incarnation != known[-1]:
            message = f"another process has become {peer}; give each process its own name"
            return Refused("duplicate_name", message, hello.incarnation, "a new incarnation")
        strange = known is None or hello.incarnation not in known
        if strange and hello.received_total and len(self._admitted) < REMEMBERED_PEERS:
            return ahead_of_journal(hello, 0)
        return None


def wrong_version(version: int) -> Refused:
    return Refused("protocol_version", "another version of Stillhouse", str(version), str(PROTOCOL_VERSION))


def ahead_of_journal(hello: Hello, known_total: int) -> Refused:
    """The peer has messages that this buffer does not know it sent, or was never met here at all (`known_total` 0):
    what they said would be done again, and numbers (rollouts, leases, batches) given out twice. The session stays as it
    is, for who says so may be lying: it ends by silence, or with the peer's next incarnation."""
    message = (
        "the buffer came back from a journal that could not be written when it died (disk full or unwritable; or the "
        "power failed, with buffer.journal_sync=process), or without one; resume the run from its last checkpoint"
    )
    return Refused("peer_ahead", message, f"{hello.received_total} messages received", f"at most {known_total}")
