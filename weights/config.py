"""Settings of weight transport from the learner to the actors, and the meaning of their `auto` values. No torch
here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.plugins import installed
from stillhouse.protocol.settings import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, Settings

SentDtype: TypeAlias = Literal["keep", "float32", "bfloat16", "float16"]
Adapters: TypeAlias = Literal["auto", "on", "off"]
PublishDtype: TypeAlias = Literal["auto", SentDtype]
Staging: TypeAlias = Literal["auto", "device", "host"]
Place: TypeAlias = Literal["device", "host"]
"""Where the copies to be sent are: next to the originals, or in pinned host memory."""

BUILT_IN: Final = {
    "collective": "stillhouse.weights.transports.servers:collective",
    "wire": "stillhouse.weights.transports.wire:WireTransport",
    "ipc": "stillhouse.weights.transports.ipc:IpcTransport",
}
"""Transports by name; each value is a callable that makes one from a weights.transport.TransportSetup."""
NO_GROUP: Final = ("wire", "ipc")
"""Transports without a process group."""
ENTRY_POINTS: Final = "stillhouse.weights"
"""Entry-point group of transports in installed packages."""
NCCL_SOCKETS_ONLY: Final = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NET": "Socket",
}
"""Variables with which NCCL's ranks talk by sockets alone, as they must where two are on one GPU: its other transports
assume that ranks which say that they are on different hosts are."""
CPU_BUCKET_BYTES: Final = 64 << 20
GPU_BUCKET_BYTES: Final = 512 << 20
"""Larger, because each bucket for an SGLang server costs an HTTP request, which 64 MiB over NVLink do not repay."""
_NAMES: Final[dict[str, SentDtype]] = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float16", "half", "torch.float16"), "float16"),
}


class WeightsConfig(Settings, frozen=True, kw_only=True):
    """Weight transport: sending to all actors at once, and deadlines for slow actors."""

    transport: str = "auto"
    """The way of a version to the actors. collective: one broadcast to all, by gloo or NCCL, which do not encrypt.
    wire: each actor fetches it from weights.control_port, encrypted and with the run's keys; the learner's link
    carries it once per actor. ipc: actors, or their servers, copy out of the learner's own copies, on the GPU that they
    share with it or in this machine's memory, two buckets (bucket_bytes) at a time. auto: ipc where all actors are on
    the learner's GPU, which the launcher decides before the start; else collective on one machine or with
    allow_plain_network, else wire. A transport from another package is given by its entry-point name (group
    stillhouse.weights) or as module:attribute."""
    adapters: Adapters = "auto"
    """With learner.lora.rank: send the adapters alone, a few megabytes per version, which SGLang servers load as files:
    by `transport` wire. off: every version is the merged student. on: the servers that the
    launcher starts get --enable-lora, and whatever stands in the way is an error. auto: on for servers on a CPU, and
    for those that already have --enable-lora, if nothing stands in the way; else off. The launcher decides before the
    start and prints its choice and the reason."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Library that carries the broadcast. auto: nccl if the learner and all actors (or their servers) have a GPU each
    and the same NCCL version, else gloo. The launcher decides before the start and prints its choice and the reason. If
    you set nccl and it cannot work, the run is refused; members that share a GPU then talk by NCCL's sockets."""
    dtype: PublishDtype = "auto"
    """Dtype in which weights are sent. auto: the dtype of the actors' weights (actor.torch.dtype; for servers that the
    launcher starts on GPUs, --dtype or the student's config.json) if that loses nothing, else keep. keep: the dtype of
    the learner's own weights, float32."""
    staging: Staging = "auto"
    """Memory for the two copies of the weights that are being sent: 2 x 4 bytes per parameter in float32, 2 x 2 in
    bfloat16 (8 billion parameters: 64 or 32 GB), divided among learner.ranks. device: on the learner's GPU, next to the
    16 bytes per parameter of training. host: pinned memory of this machine; training waits for the copy, at about 25
    GB/s. auto: host with gloo, which sends from there; else device, unless the GPU has no room for them by the
    launcher's estimate, or on one that members share both take more than a tenth of it. Decided before the start."""
    host: str = "127.0.0.1"
    """Address of this machine at which the actors reach the learner. The store, the control channel and gloo listen on
    this address only."""
    allow_plain_network: bool = False
    """Allow broadcasts, and a learner with ranks, on a `host` that other machines can reach. torch's store, gloo and
    NCCL neither encrypt nor authenticate: anyone on that network can read the weights and disturb or forge their
    transfer. Use it on a private network only. When off, weights go to other machines by transport = wire."""
    store_port: Port = 0
    """TCP port of torch's store. 0: the system chooses (each weight plan names the port). For SGLang servers each group
    has a store of its own, one after the other on this port."""
    control_port: Port = 0
    """TCP port of the control channel. 0: the system chooses."""
    bucket_bytes: Annotated[int, Meta(ge=0, multiple_of=64)] = 0
    """Size of the pieces in which a broadcast sends the weights, in bytes; the learner holds up to two more of them.
    For SGLang servers a piece consists of whole tensors, may be larger than this for one large tensor, and costs an
    HTTP request. 0: 512 MiB when the learner is on a GPU, else 64 MiB. Never more than all weights."""
    join_timeout_s: PositiveFloat = 30.0
    """Seconds for an actor to join a new group. A slower actor is left out. Large models get more time: see
    slowest_bytes_per_s."""
    broadcast_timeout_s: PositiveFloat = 30.0
    """Seconds for an actor to confirm a version. A slower actor is left out, and the others continue without it. Large
    models and checked versions get more time: see slowest_bytes_per_s."""
    slowest_bytes_per_s: PositiveFloat = 250e6
    """Slowest acceptable rate, in bytes per second, of reading, hashing, sending or loading a version. join_timeout_s
    and broadcast_timeout_s are extended by this rate's time for each pass over the bytes, and with transport = wire for
    each actor's copy. A limit that is missed anyway is doubled for the next time, up to 16 times."""
    answer_grace_s: PositiveFloat = 3.0
    """Seconds for the actors to answer after a broadcast has failed. An actor that stays silent is left out."""
    join_window_s: NonNegativeFloat = 2.0
    """After an actor comes or goes, wait this many seconds for further changes before making a new group. Ends early
    when all expected actors are connected."""
    rejoin_delay_s: PositiveFloat = 5.0
    """Seconds before an actor that was left out may come back; doubled each time it happens again, up to 60
    times. A restarted actor may come back at once."""
    every_version: bool = False
    """Deliver every version, and let training wait while two are still on their way; needed for max_staleness = 0. When
    off, a version is skipped if a newer one is ready before it can be sent."""
    verify: Literal["auto", "reload", "off"] = "auto"
    """The proof that an SGLang server gives, before it samples with new weights, that it has the ones sent. reload:
    it loads the same version again from a file that the learner writes for this, and its checksums must not change; its
    log-probs of a short prompt must also match the learner's. auto: reload, or the prompt alone for a server without
    checksums. off: no proof."""
    verify_every: NonNegativeInt = 10
    """Repeat the prompt of `verify` with every n-th version. The full proof is made with the first version after each
    change of the group. 0: only then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.transport:
            raise ValueError(f"transport is empty; expected auto, {', '.join(BUILT_IN)}, or module:attribute")
        if not self.host:
            raise ValueError("host is empty; expected an address of this machine that the actors can reach")
        if self.backend == "nccl" and self.transport in NO_GROUP:
            raise ValueError(
                f"backend = nccl with transport = {self.transport}, which makes no process group; use backend = auto"
            )
        if self.verify == "reload" and self.way == "wire":
            raise ValueError(
                "verify = reload with transport = wire: servers would compare a file with itself, because they "
                "load every version from one; use verify = auto, a prompt that learner and server both score"
            )
        plain = self.backend == "nccl" or self.transport not in ("auto", *NO_GROUP)
        if plain and not is_local(self.host) and not self.allow_plain_network:
            asked = "backend = nccl" if self.backend == "nccl" else f"transport = {self.transport}"
            raise ValueError(
                f"host is {self.host}, which other machines can reach, and with {asked} weights are sent without "
                "encryption (torch has none). Leave transport and backend at auto, which encrypts; or, on a private "
                "network, set weights.allow_plain_network = true"
            )

    @property
    def way(self) -> str:
        """The transport, where auto is decided."""
        if self.transport != "auto":
            return self.transport
        return "collective" if is_local(self.host) or self.allow_plain_network else "wire"

    @property
    def makes_groups(self) -> bool:
        """Whether a process group carries the weights."""
        return self.way not in NO_GROUP


def find_transport(way: str) -> str:
    """`module:attribute` of a transport (`WeightsConfig.way`). Raises ValueError for a name that nothing has."""
    target = BUILT_IN.get(way, way)
    if ":" in target:
        return target
    found = installed(ENTRY_POINTS)
    if way not in found:
        known = ", ".join(["auto", *BUILT_IN, *found])
        raise ValueError(f"weights.transport: got {way!r}, expected one of {known}, or module:attribute of your own")
    return found[way]


def sockets_only(environment: Mapping[str, str]) -> bool:
    """Whether NCCL's ranks in this environment reach each other by sockets alone."""
    return all(environment.get(name) == "1" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"))


def own_nccl_host(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """NCCL_HOSTID for a member of the weight group, which replaces the host's hash (getHostHash in NCCL's utils.cc), so
    that a member on the same GPU is not refused as a duplicate. Empty where NCCL may use more than sockets."""
    return {"NCCL_HOSTID": name} if sockets_only(environment) and "NCCL_HOSTID" not in environment else {}


def sent_dtype(asked: PublishDtype, held: SentDtype) -> SentDtype:
    """`held`: the dtype of the members' weights; keep if it is not known."""
    return held if asked == "auto" else asked


def server_dtype(args: Sequence[str], device: str, checkpoint_dtype: str | None) -> SentDtype:
    """The dtype in which a server started by the launcher holds its weights: --dtype among its extra arguments, else
    the dtype in the student's config.json (`checkpoint_dtype`). keep where another dtype might lose something: SGLang
    turns a float32 checkpoint into float16, and our servers on a CPU run in float32."""
    for i, word in enumerate(args):
        name, given, value = word.partition("=")
        if name == "--dtype":
            wanted = value if given else args[i + 1] if i + 1 < len(args) else ""
            if wanted != "auto":
                return _NAMES.get(wanted, "keep")
    return "keep" if device == "cpu" else _NAMES.get(checkpoint_dtype or "", "keep")


def checkpoint_dtype(student: str) -> str | None:
    """The dtype that config.json names; None if it names none, or `student` is not a local folder."""
    try:
        config: dict[str, Any] = json.loads((Path(student).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    of_text: dict[str, Any] = config.get("text_config") or {}
    named = [of.get(key) for of in (config, of_text) for key in ("dtype", "torch_dtype")]
    return next((str(name) for name in named if name), None)


def bucket_size(asked: int, device_type: str) -> int:
    """`asked` 0: chosen by the learner's device."""
    return asked or (GPU_BUCKET_BYTES if device_type == "cuda" else CPU_BUCKET_BYTES)


def staged_in(config: WeightsConfig, device_type: str, backend: Literal["gloo", "nccl"]) -> Place:
    """Gloo sends from host memory, so copies there need no further copy. The launcher decides auto elsewhere by the
    room that there is (launch.checks.memory.staged). On a CPU the device is the host."""
    if device_type != "cuda":
        return "device"
    if config.staging == "auto":
        return "host" if backend == "gloo" else "device"
    return config.staging
