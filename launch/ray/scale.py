"""`cluster.py scale RUN --actors N`: changes how many workers a run on Ray has, while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from launch.config.command_line import split_words
from launch.config.files import read_config
from launch.errors import ConfigError, LaunchError, refuse
from launch.join.target import find_folder, running_record
from launch.ray.hosts import HOSTS_FILE, Wanted, read_wanted, write_wanted
from launch.report.figures import plural

USAGE: Final = """\
usage: cluster.py scale RUN [--actors N] [--teachers M]

Changes the numbers of actors and teachers of a run that was started with --backend ray, while it goes on. Those that
are too many leave: their unfinished work goes to others. The run's console says what it does.

  RUN            folder of the run, or its name in runs/
  --actors N     actors on the nodes of Ray, in all
  --teachers M   teachers on the nodes of Ray, in all
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        words = split_words(arguments, own=("actors", "teachers"), switches=("help",), positional=1)
        if "help" in words.switches:
            print(USAGE, end="")
            return 0
        if len(words.positional) != 1 or not words.own:
            raise ConfigError("expected a RUN, and --actors N or --teachers M; --help shows how")
        if wrong := [
            f"--{role}: got {text!r}, expected a number" for role, text in words.own.items() if not text.isdecimal()
        ]:
            raise ConfigError(*wrong)
        folder = find_folder(words.positional[0])
        running_record(folder)
        before = read_wanted(folder)
        if before is None:
            raise ConfigError(f"{folder}: has no {HOSTS_FILE}: this run was not started with --backend ray")
        cluster = read_config(folder / "config.yaml").cluster
        for role, hosts in (("actors", cluster.actors), ("teachers", cluster.teachers)):
            if role in words.own and not hosts.each:
                raise ConfigError(f"--{role}: the run has cluster.{role}.each = 0, its {role} are beside the learner")
        wanted: Wanted = msgspec.structs.replace(before, **{role: int(text) for role, text in words.own.items()})
        write_wanted(folder, wanted)
    except LaunchError as error:
        return refuse(error)
    print(f"{plural(wanted.actors, 'actor')} and {plural(wanted.teachers, 'teacher')} on Ray are wanted from now on")
    return 0
