"""What those who joined show and leave behind: a line now and then, and an account in their folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from launch.report.figures import RunView, clock, short
from launch.report.status import QuietStatus
from protocol.messages import PeerView, Snapshot


class JoinStatus(QuietStatus):
    """One line every `every_s`; None: events only."""

    def __init__(self, every_s: float | None, now_s: float) -> None:
        self._every_s = every_s
        self._shown_s = now_s

    def show(self, view: RunView) -> None:
        """Shown when it is time to."""
        if self._every_s is not None and view.now_s - self._shown_s >= self._every_s:
            self._shown_s = view.now_s
            print(join_line(view), flush=True)


def join_line(view: RunView) -> str:
    """Everything that matters, in one line."""
    ours = own_peers(view.snapshot, view.workers)
    running = Counter(name.partition("-")[0] for name, runs in view.workers.items() if runs)
    there = Counter(peer.role for peer in ours.values() if peer.alive)
    of = Counter(name.partition("-")[0] for name in view.workers)
    step = f"step {view.snapshot.version.step}/{view.steps}" if view.snapshot is not None else "step ?"
    parts = [f"[{clock(view.elapsed_s)}] {step}"]
    for role, did in (("actor", "written"), ("teacher", "graded")):
        if of[role]:
            tokens = sum(peer.tokens_total for peer in ours.values() if peer.role == role)
            parts.append(
                f"{role}s {running[role]} of {of[role]} run, {there[role]} there, tokens {did} {short(tokens)}"
            )
    versions = Counter(str(peer.version) for peer in ours.values() if peer.role == "actor" and peer.version is not None)
    if versions:
        parts.append("weights " + ", ".join(f"{version} x{n}" for version, n in sorted(versions.items())))
    if view.restarts:
        parts.append(f"restarts {view.restarts}")
    if view.servers_up < view.servers:
        parts.append(f"{view.servers_up} of {view.servers} SGLang servers answer")
    return " | ".join(parts)


def own_peers(snapshot: Snapshot | None, names: Mapping[str, object]) -> dict[str, PeerView]:
    """Those of our workers that the buffer has met."""
    return {peer.name: peer for peer in snapshot.peers if peer.name in names} if snapshot is not None else {}


class JoinedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did, over all its processes, as the buffer told last."""

    tokens: int
    done: int
    restarts: int
    exit_codes: list[int]


class JoinSummary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json of a joiner's folder."""

    run: str
    run_id: str
    ok: bool
    reason: str
    exit_code: int
    broke_off: bool
    """It was the run that ended otherwise than well, or was not to be reached; nobody asked us to leave."""
    wall_s: float
    ready_s: float | None
    workers: dict[str, JoinedWorker]
