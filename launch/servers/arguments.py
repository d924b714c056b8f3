"""GPUs that servers share with others, and whether they leave them room."""

from __future__ import annotations

from collections.abc import Iterator

from launch.config.run import RunConfig
from launch.machine.gpus import LEARNER, Places
from launch.servers.plan import launched_groups, server_config, servers_of


def contradictions(config: RunConfig) -> Iterator[str]:
    """Of the user's own arguments with the rest of the configuration. `server.device` is cpu or cuda."""
    for key, role, _, own in launched_groups(config):
        yield from servers_of(own, role).contradictions(key, role, server_config(own, role))


def overfull_gpus(config: RunConfig, places: Places) -> Iterator[str]:
    """GPUs that a server shares with others without leaving them room: unless it is told, it takes nearly all of it."""
    others: dict[int, list[str]] = {}
    for who, gpu in places.seats.items():
        if gpu is not None:
            others.setdefault(gpu, []).append("the learner" if who == LEARNER else who)
    servers: dict[int, list[tuple[str, str, float | None]]] = {}
    for key, role, first, own in launched_groups(config):
        fraction = servers_of(own, role).memory_fraction(server_config(own, role).args)
        for index, group in enumerate(places.servers.get(key, ())):
            for gpu in group:
                servers.setdefault(gpu, []).append((key, f"server-{role}-{first + index}", fraction))
    for gpu, here in sorted(servers.items()):
        beside = others.get(gpu, [])
        names = [*beside, *(name for _, name, _ in here)]
        if len(names) < 2:
            continue
        for key, name, fraction in here:
            if fraction is None:
                yield (
                    f"{key}.server.args: {name} shares GPU {gpu} with "
                    f"{', '.join(other for other in names if other != name)}, and without --mem-fraction-static takes "
                    f"nearly all of its memory; expected e.g. --{key}.server.args=--mem-fraction-static,0.3"
                )
        total = sum(fraction or 0.0 for _, _, fraction in here)
        if total > 1.0 or (beside and total >= 1.0):
            yield (
                f"{here[0][0]}.server.args: the servers on GPU {gpu} take {total:g} of its memory together "
                f"(--mem-fraction-static), expected less than 1 with {', '.join(names)} on it"
            )
