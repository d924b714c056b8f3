"""Settings of how weights get from the learner to the actors. No torch here."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

import msgspec

from protocol.addresses import is_local

PublishDtype: TypeAlias = Literal["auto", "keep", "float32", "bfloat16", "float16"]
Staging: TypeAlias = Literal["auto", "device", "host"]

BUILT_IN: Final = {
    "collective": "weights.transports.collective:collective",
    "folder": "weights.transports.folder:FolderTransport",
}
"""Transports by name; what stands there makes one of a weights.transport.Setup."""
ENTRY_POINTS: Final = "stillhouse.weights"
"""Entry-point group of further ones."""
_BUCKET_UNIT_BYTES = 64


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The collective path (all actors at once), the snapshot path (those who were not there), and who is waited for."""

    transport: str = "auto"
    """How a version gets to the actors. collective: one broadcast to all. folder: as a file in the run's folder, for
    actors that can read it and reach nothing of the learner's but weights.control_port. auto: collective. A transport
    of another package by the name of its entry point (stillhouse.weights), or as module:attribute."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl where the learner and all actors (or their servers) have a GPU each and the same NCCL, else gloo. The
    launcher decides before the start, and says which and why; nccl that cannot work is refused then."""
    dtype: PublishDtype = "auto"
    """Of what is sent and staged. auto: that of the actors' weights (actor.torch.dtype; of servers that the launcher
    starts on GPUs, --dtype or the student's config.json), in which nothing is lost, else keep: that of the learner's
    own weights, which is float32."""
    staging: Staging = "auto"
    """Where two copies of all weights lie while they are sent: 2 x 4 bytes per parameter in float32, 2 x 2 in bfloat16
    (8 billion: 64 or 32 GB). device: beside the learner's own, 16 bytes per parameter; host: in pinned memory of this
    machine, which training waits for at about 25 GB/s. auto: host with gloo, which sends from there, else device."""
    host: str = "127.0.0.1"
    """Address of this machine at which the actors reach the learner; the store, the control channel and gloo listen on
    it and on nothing else."""
    allow_plain_network: bool = False
    """Needed where other machines reach `host`: neither torch's store nor gloo nor NCCL can encrypt or ask who comes;
    others can read the weights and disturb their sending. Say it on a private network only."""
    store_port: int = 0
    """TCP port of the store. 0: the system chooses (it is told in every WeightPlan). For SGLang servers each group has
    a store of its own, one after the other on this port."""
    control_port: int = 0
    """TCP port of the control channel. 0: the system chooses."""
    bucket_bytes: int = 0
    """A broadcast moves the weights in pieces of this size, a multiple of 64; the learner holds up to two more of them.
    For SGLang servers a piece is whole tensors, one tensor may be larger, and each piece costs an HTTP request. 0: 512
    MiB when the learner is on a GPU, else 64 MiB; never more than all weights."""
    join_timeout_s: float = 30.0
    """An actor that has not taken up a plan (loading the snapshot included) by then is left out. For large models more
    is given: see slowest_bytes_per_s."""
    broadcast_timeout_s: float = 30.0
    """An actor that has not confirmed a version by then is left out, and the others go on without it. For large models,
    and for checked versions, more is given: see slowest_bytes_per_s."""
    slowest_bytes_per_s: float = 250e6
    """At least so fast a version is read, hashed, sent or loaded: join_timeout_s and broadcast_timeout_s are longer by
    the time that this takes for each pass over its bytes. When one is missed all the same it is doubled for the next
    time, up to 16 times its length."""
    answer_grace_s: float = 3.0
    """Once a broadcast has failed, those that live get this long to say so; who stays silent is left out."""
    join_window_s: float = 2.0
    """After a change of membership wait this long for further ones before the group is made anew. Cut short when all
    expected actors are there."""
    rejoin_delay_s: float = 5.0
    """An actor that was left out may come back after this long; doubled each time it happens again. A restarted one
    comes back at once."""
    rejoin_delay_max_s: float = 300.0
    """Upper bound of that delay."""
    every_version: bool = False
    """Off: a version that is overtaken while it waits is skipped. On: each one is delivered, and `publish` waits while
    two are still on their way. Needed for max_staleness = 0."""
    publish_wait_s: float = 120.0
    """With every_version: how much longer than making a group and checking a version may take `publish` waits before it
    raises."""
    keep_snapshots: int = 2
    """The newest so many stay in the run folder."""
    verify: Literal["auto", "reload", "off"] = "auto"
    """How an SGLang server proves, before it samples anything, that it has the weights that were sent. reload: it loads
    the same version again, from the snapshot file, and its checksums must stay the same; also, its log-probs of a short
    prompt must be the learner's. auto: reload; a server that has no checksums is checked by the prompt alone. off: no
    proof."""
    verify_every: int = 10
    """When: both with the first version after each change of the group, and then the prompt with every so many
    versions. 0: only the first."""

    def __post_init__(self) -> None:
        if not self.transport:
            raise ValueError(f"transport is empty; expected auto, {', '.join(BUILT_IN)}, or module:attribute")
        if self.transport == "folder" and self.backend == "nccl":
            raise ValueError("backend = nccl with transport = folder, which makes no process group; use backend = auto")
        if self.transport == "folder" and self.verify == "reload":
            raise ValueError(
                "verify = reload with transport = folder: servers load each version from the very file that they would "
                "be compared with; use verify = auto, a prompt that learner and server both score"
            )
        if not self.host:
            raise ValueError("host is empty; expected an address of this machine that the actors can reach")
        if not is_local(self.host) and not self.allow_plain_network:
            raise ValueError(
                f"host is {self.host}, which other machines reach, and weights are sent without encryption (torch has "
                "none). On a network where that is fine say weights.allow_plain_network = true"
            )
        for name in ("store_port", "control_port"):
            port: int = getattr(self, name)
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} = {port}; expected 0 to 65535 (0: the system chooses)")
        if self.bucket_bytes < 0 or self.bucket_bytes % _BUCKET_UNIT_BYTES:
            raise ValueError(f"bucket_bytes = {self.bucket_bytes}; expected a multiple of 64, or 0 (by the device)")
        for name in (
            "join_timeout_s",
            "broadcast_timeout_s",
            "slowest_bytes_per_s",
            "answer_grace_s",
            "rejoin_delay_s",
            "rejoin_delay_max_s",
            "publish_wait_s",
        ):
            value: float = getattr(self, name)
            if not 0 < value < math.inf:
                unit = "bytes per second" if name == "slowest_bytes_per_s" else "seconds"
                raise ValueError(f"{name} = {value}; expected a positive, finite number of {unit}")
        if not 0 <= self.join_window_s < math.inf:
            raise ValueError(f"join_window_s = {self.join_window_s}; expected 0 or more seconds")
        if self.rejoin_delay_max_s < self.rejoin_delay_s:
            raise ValueError(
                f"rejoin_delay_max_s = {self.rejoin_delay_max_s}; expected at least rejoin_delay_s = "
                f"{self.rejoin_delay_s}"
            )
        if self.verify_every < 0:
            raise ValueError(f"verify_every = {self.verify_every}; expected 0 (only the first) or more")
        if self.keep_snapshots < 1:
            raise ValueError(f"keep_snapshots = {self.keep_snapshots}; expected at least 1 (joiners read the newest)")
