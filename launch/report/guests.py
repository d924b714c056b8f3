"""Workers that joined a run (launch.join.command), as its own launcher sees them: through the buffer's snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator

from protocol.messages import PeerView, Snapshot

NAMES_SHOWN = 8


def guests(snapshot: Snapshot, own: Container[str]) -> list[PeerView]:
    """Actors and teachers that are none of the launcher's `own`, those included that have left."""
    return [peer for peer in snapshot.peers if peer.role in ("actor", "teacher") and peer.name not in own]


def counted(peers: Iterable[PeerView]) -> str:
    """`2 actors, 1 teacher`."""
    roles = Counter(peer.role for peer in peers)
    return ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in sorted(roles.items()))


class Guests:
    """Remembers who was there, to tell who came and who left."""

    def __init__(self, own: Container[str]) -> None:
        self._own = own
        self._here: dict[str, PeerView] = {}

    def news(self, snapshot: Snapshot) -> Iterator[str]:
        """One line for those that came since the last snapshot, one for those that left. At the end all leave, which is
        no news."""
        if snapshot.phase != "running":
            return
        here = {peer.name: peer for peer in guests(snapshot, self._own) if peer.alive}
        before, self._here = self._here, here
        for what, some in (("joined", here.keys() - before.keys()), ("left", before.keys() - here.keys())):
            if some:
                peers = [(here | before)[name] for name in sorted(some)]
                more = f" and {len(peers) - NAMES_SHOWN} more" if len(peers) > NAMES_SHOWN else ""
                names = ", ".join(peer.name for peer in peers[:NAMES_SHOWN])
                yield f"{counted(peers)} {what} the run: {names}{more}"
