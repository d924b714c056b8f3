"""`stillhouse scale RUN --actors N`: changes how many workers a run on Ray has, while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from stillhouse.launch.config.command_line import split_words
from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError, LaunchError, refuse
from stillhouse.launch.join.target import find_folder, running_record
from stillhouse.launch.ray.wanted import HOSTS_FILE, LONGEST_NUMBER, Wanted, change_wanted, read_wanted

USAGE: Final = """\
usage: stillhouse scale RUN [--actors N] [--teachers M [--pool NAME]]

Changes the numbers of actors and teachers of a run that was started with --backend ray, while it goes on. Those that
are too many leave: their unfinished work goes to others. The run's console says what it does.

  RUN            folder of the run, or its name in runs/
  --actors N     actors on the nodes of Ray, in all
  --teachers M   teachers on the nodes of Ray, in all
  --pool NAME    in a run with pools: the pool whose teachers these are
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        words = split_words(arguments, own=("actors", "teachers", "pool"), switches=("help",), positional=1)
        if "help" in words.switches:
            print(USAGE, end="")
            return 0
        numbers = {role: words.own[role] for role in ("actors", "teachers") if role in words.own}
        if len(words.positional) != 1 or not numbers:
            raise ConfigError("expected a RUN, and --actors N or --teachers M; --help shows how")
        if wrong := [
            f"--{role}: got {text!r}, expected a number of at most {LONGEST_NUMBER} digits"
            for role, text in numbers.items()
            if not text.isdecimal() or len(text) > LONGEST_NUMBER
        ]:
            raise ConfigError(*wrong)
        folder = find_folder(words.positional[0])
        running_record(folder)
        if read_wanted(folder) is None:
            raise ConfigError(f"{folder}: has no {HOSTS_FILE}: this run was not started with --backend ray")
        pool, config = words.own.get("pool", ""), read_config(folder / "config.yaml")
        if mistakes := list(_mistakes(config, numbers, pool)):
            raise ConfigError(*mistakes)
        wanted = change_wanted(folder, lambda now: changed(now, {role: int(n) for role, n in numbers.items()}, pool))
    except OSError as error:  # a full disk, or somebody else's folder
        return refuse(LaunchError(f"the numbers of workers cannot be changed: {error}"))
    except LaunchError as error:
        return refuse(error)
    print(f"wanted on Ray from now on: {wanted}")
    return 0


def changed(now: Wanted, numbers: Mapping[str, int], pool: str) -> Wanted:
    """The same with these numbers by role. `pool`: whose teachers they are; empty in a run without pools."""
    if pool and "teachers" in numbers:
        now = msgspec.structs.replace(now, pools={**now.pools, pool: numbers["teachers"]})
        numbers = {role: n for role, n in numbers.items() if role != "teachers"}
    return msgspec.structs.replace(now, **numbers)


def _mistakes(config: RunConfig, numbers: Mapping[str, str], pool: str) -> Iterator[str]:
    for role, hosts in (("actors", config.cluster.actors), ("teachers", config.cluster.teachers)):
        if role in numbers and not hosts.each:
            yield f"--{role}: the run has cluster.{role}.each = 0, its {role} are beside the learner"
        if 0 < int(numbers.get(role, 0)) < config.buffer.shards:
            yield (
                f"--{role}: got {numbers[role]}, expected at least buffer.shards = {config.buffer.shards}, or 0; each "
                "shard of the buffer needs one of its own"
            )
    if "teachers" in numbers and pool not in (config.pools or ("",)):
        pools = " or ".join(config.pools)
        expected = f"expected --pool {pools}" if pools else "expected none: the run has no pools"
        yield f"--pool: got {pool or 'none'}, {expected}"
