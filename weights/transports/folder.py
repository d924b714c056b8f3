"""Versions as files, for actors that no collective reaches: each version is a snapshot in the run's folder, which
members load when the control channel asks them to.

    learner    write snapshot (atomic, sha256) | Round: version, file, sha256     | wait for answers
    member                                     | check sha256, load, prove, Answer |

Members need the run's folder, and a connection to the learner's control port; there are no other connections
to or from them. Versions, proofs, deadlines and reasons for leaving out a member are those of the other transports. A
file that a member refuses is written again for the next attempt.
"""

from __future__ import annotations

from stillhouse.protocol.messages import WeightsRef
from stillhouse.weights.buckets import ALIGN_BYTES, BucketLayout, Content, EqualBuckets
from stillhouse.weights.control_messages import WeightCheck
from stillhouse.weights.group_host import GroupHost, NotSent
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.staged_weights import StagedVersion
from stillhouse.weights.transport import RoundResult


class NoGroup:
    """A channel that does nothing: members only read files and answer."""

    def join(self, timeout_s: float) -> None: ...

    def send(self, round_number: int, layout: BucketLayout, content: Content, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class FolderTransport(GroupHost):
    """Snapshots that members load."""

    backend = "folder"
    independent = True

    def publish(self, weights: StagedVersion, check: WeightCheck | None = None) -> RoundResult:
        result = super().publish(weights, check)
        if "refused" in result.lost.values():
            self._snapshots.forget()
        return result

    def _meet_at(self) -> int:
        return 0

    def _open(self, seats: tuple[GroupSeat, ...]) -> NoGroup:
        return NoGroup()

    def _layout_of(self, manifest: WeightManifest) -> BucketLayout:
        return EqualBuckets(manifest, ALIGN_BYTES)

    def _file_of(self, weights: StagedVersion) -> WeightsRef:
        ref = self._snapshots.write(weights)
        if ref is None:
            raise NotSent(f"version {weights.version} could not be written to the run's folder")
        return ref
