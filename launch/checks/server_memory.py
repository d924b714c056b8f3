"""Plans what servers take of their GPUs, and in which order those that share one start. No torch.

On a GPU of its own a server takes what its engine and the user's arguments say. On one that it shares with others, each
server's cache is planned: what the user's arguments give it, else an equal part of what all roles leave there, less
SPARE, and at most MOST_TOKENS. The server is told so by arguments (`ServerEngine.cache_arguments`), so that what it
takes depends neither on what is free when it measures nor on how often it is started again. There servers start one
after the other, in the order of `Sized.needs`, and then the embedded roles (launch.servers.watch).

In turns (launch.share) each has the GPU for itself, but for what stays of the others (STAYS).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.engines.provider import GpuRoom, MemoryNeed, ModelShape
from stillhouse.launch.config.pools import WorkerGroup
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.gpus import Places
from stillhouse.launch.servers.plan import launched_groups

GIB: Final = 2**30
PROCESS_GIB: Final = 1.0
STAYS: Final = ("process", "staging", "teachers' heads", "CUDA graphs")
"""What of a role stays on a device that it shares in turns, when the turn is another's (docs/one-gpu.md)."""
SPARE: Final = 0.05
"""Share of a GPU's memory that no cache gets."""
MOST_TOKENS: Final = 2**22
"""No planned cache has more: 4,096 requests, SGLang's own limit of those that run, with 1,024 tokens each."""
NO_SHAPE: Final = ModelShape(0, 0, 0, 0, 0, 0, 0, False, False, 2)


class ServerNeed(NamedTuple):
    gpu: int
    worker: str
    need: MemoryNeed

    @property
    def total(self) -> float:
        return sum(self.need.sure.values()) + sum(self.need.likely.values()) + PROCESS_GIB * GIB

    @property
    def stays(self) -> float:
        return sum(n for part, n in self.need.likely.items() if part in STAYS) + PROCESS_GIB * GIB


class Sized(NamedTuple):
    needs: list[ServerNeed]
    """One per server and GPU of it, in the order of their start."""
    arguments: dict[str, tuple[str, ...]]
    """Worker -> the arguments that its server gets for this."""
    mistakes: list[str]


class _Server(NamedTuple):
    group: WorkerGroup
    worker: str
    gpus: tuple[int, ...]
    shape: ModelShape

    def need(self, gpu: int, room: GpuRoom) -> ServerNeed:
        memory = self.group.servers.memory(self.group.role, self.group.settings.server, self.shape, room)
        return ServerNeed(gpu, self.worker, memory)


def size_servers(
    config: RunConfig,
    places: Places,
    gib: tuple[float, ...],
    embedded: Mapping[int, float],
    shape_at: Callable[[Path], ModelShape | None],
) -> Sized:
    """`gib`: of each GPU; empty: unknown. `embedded`: GPU -> bytes of the roles there that are no servers, in turns
    what stays of them."""
    found = [(group, *one) for group in launched_groups(config) for one in _gpus_of(group, places)]
    per_gpu = Counter(gpu for _, _, gpus in found for gpu in gpus)
    shared = {gpu for gpu, n in per_gpu.items() if n > 1 or gpu in embedded}
    sized = Sized([], {}, [])
    known: list[_Server] = []
    for group, worker, gpus in found:
        if gib and (shape := shape_at(Path(group.model))) is not None:
            known.append(_Server(group, worker, gpus, shape))
        elif shared & {*gpus} and group.servers.own_cache(group.settings.server, NO_SHAPE, 0.0) is None:
            what = "the size of its model" if gib else "how much memory that has"
            sized.mistakes.append(
                f"{group.key}.server.args: server-{worker} shares GPU {min(shared & {*gpus})}, and {what} is not "
                f"known; expected e.g. --{group.key}.server.args=--mem-fraction-static,0.9,--max-total-tokens,65536"
            )
    total = [each * GIB for each in gib]
    alone = [server for server in known if not shared & {*server.gpus}]
    sized.needs.extend(s.need(gpu, GpuRoom(total[gpu], total[gpu])) for s in alone for gpu in s.gpus)
    sharing = [server for server in known if shared & {*server.gpus}]
    if config.launch.share != "turns":
        _share(config, sharing, total, embedded, sized)
        return sized
    for server in sharing:
        stays = defaultdict[int, float](float, embedded)
        for other in sharing:
            for at in other.gpus if other is not server else ():
                stays[at] += other.need(at, GpuRoom(total[at], total[at], 0.0)).stays
        _share(config, [server], total, stays, sized)
    return sized


def _share(
    config: RunConfig, servers: list[_Server], total: list[float], embedded: Mapping[int, float], sized: Sized
) -> None:
    """Those first whose size the user's arguments say: what they find free decides it."""
    taken = defaultdict[int, float](float)
    caches: dict[str, float] = {}
    open_: list[_Server] = []
    for server in servers:
        free = min(total[gpu] - taken[gpu] for gpu in server.gpus)
        own = server.group.servers.own_cache(server.group.settings.server, server.shape, free)
        if own is None:
            open_.append(server)
            continue
        caches[server.worker] = own
        for gpu in server.gpus:
            taken[gpu] += server.need(gpu, GpuRoom(total[gpu], free, own)).total
    for gpu in embedded:
        taken[gpu] += embedded[gpu]
    for server in open_:
        for gpu in server.gpus:
            taken[gpu] += server.need(gpu, GpuRoom(total[gpu], total[gpu], 0.0)).total
    waiting = Counter(gpu for server in open_ for gpu in server.gpus)
    for server in open_:
        left = min((total[gpu] * (1.0 - SPARE) - taken[gpu]) / waiting[gpu] for gpu in server.gpus)
        most = MOST_TOKENS * server.group.servers.cache_token_bytes(server.group.settings.server, server.shape)
        caches[server.worker] = max(0.0, min(left, most))
    for server in sorted(servers, key=lambda server: server in open_):
        cache, settings = caches[server.worker], server.group.settings.server
        sized.needs.extend(server.need(gpu, GpuRoom(total[gpu], total[gpu], cache)) for gpu in server.gpus)
        sized.arguments[server.worker] = server.group.servers.cache_arguments(settings, server.shape, cache)
        sized.mistakes.extend(_too_small(config, server, cache))


def _too_small(config: RunConfig, server: _Server, cache: float) -> Iterator[str]:
    tokens = config.learner.tasks.max_prompt_tokens + config.learner.tasks.max_new_tokens
    least = tokens * server.group.servers.cache_token_bytes(server.group.settings.server, server.shape)
    if cache < least:
        yield (
            f"{server.group.key}.server: got {cache / GIB:.1f} GiB for the cache of server-{server.worker} on "
            f"GPU {min(server.gpus)}, which it shares, expected at least {least / GIB:.1f} for a rollout of {tokens} "
            "tokens: use fewer roles there, smaller models, or what makes the learner smaller (learner.recompute, "
            "learner.lora.rank, learner.moments)"
        )


def _gpus_of(group: WorkerGroup, places: Places) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from zip(group.workers, places.servers.get(group.key, ()), strict=False)
