"""`stillhouse render SCHEDULER`: prints the file with which a scheduler starts a run on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.launch.config.command_line import CommandLine, Words, resolve_config, split_words
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError, LaunchError, refuse
from stillhouse.launch.render.kubernetes import kubernetes_files
from stillhouse.launch.render.slurm import sbatch_script, slurm_job
from stillhouse.launch.topology import HostGroup, host_groups

USAGE: Final = """\
usage: stillhouse render slurm --run-dir DIR [--config FILE] [--KEY VALUE ...] > job.sbatch
       stillhouse render k8s --name NAME --private DIR [--config FILE] [--KEY VALUE ...] > run.yaml

Prints the file with which Slurm (sbatch job.sbatch) or Kubernetes (kubectl apply -f run.yaml) starts a run on several
hosts, and continues it from its newest checkpoint when it starts it again. The section `cluster` says how many workers
share a host, and what each host has; all other keys are those of a run. docs/cluster.md has an example of each.

  --run-dir DIR      Slurm: folder of the run; all hosts must see it under this path, as they must see this clone
  --name NAME        name of the run, and of what belongs to it: lower-case letters, digits and dashes
  --private DIR      Kubernetes: folder for the keys of the run and their Secrets, secrets.yaml. It is made if it is not
                     there; keys that it has are kept. Only you can read it
  --config FILE      configuration of the run
  --KEY VALUE        any key of a run; stillhouse --help explains all keys, --help cluster those of hosts
"""


class RenderLine(NamedTuple):
    """The parsed command line."""

    words: Words
    file: Path | None
    config: RunConfig
    groups: tuple[HostGroup, ...]

    def flag(self, name: str, expected: str) -> str:
        """Value of a flag of this scheduler. Raises ConfigError without it."""
        if not self.words.own.get(name):
            raise ConfigError(f"--{name.replace('_', '-')}: got none, expected {expected}")
        return self.words.own[name]


class Scheduler(NamedTuple):
    render: Callable[[RenderLine], str]
    flags: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        every = sorted({flag for scheduler in SCHEDULERS.values() for flag in scheduler.flags})
        words = split_words(arguments, own=("config", *every), switches=("help",), positional=1)
        if "help" in words.switches:
            print(USAGE, end="")
            return 0
        name = "".join(words.positional)
        if name not in SCHEDULERS:
            raise ConfigError(f"render: got {name or 'nothing'}, expected {', '.join(SCHEDULERS)}; --help shows how")
        if foreign := [flag for flag in words.own if flag not in ("config", *SCHEDULERS[name].flags)]:
            raise ConfigError(*(f"--{flag.replace('_', '-')}: {name} does not have it" for flag in foreign))
        file = Path(words.own["config"]).expanduser().absolute() if "config" in words.own else None
        config = resolve_config(CommandLine(config=file, overrides=words.overrides))
        if config.launch.backend != "local":
            raise ConfigError(
                f"launch.backend: got {config.launch.backend}, expected local: {name} starts all hosts of a job"
            )
        text = SCHEDULERS[name].render(RenderLine(words, file, config, host_groups(config)))
    except LaunchError as error:
        return refuse(error)
    print(text, end="")
    return 0


def _slurm(asked: RenderLine) -> str:
    run_dir = Path(asked.flag("run_dir", "the folder of the run, which all hosts see")).expanduser().absolute()
    return sbatch_script(slurm_job(run_dir, asked.file, asked.words.overrides, asked.config))


def _kubernetes(asked: RenderLine) -> str:
    name = asked.flag("name", "a name for the run")
    private = Path(asked.flag("private", "a folder for the keys of the run")).expanduser().absolute()
    try:
        return kubernetes_files(asked.config, asked.groups, name, private)
    except OSError as error:
        raise LaunchError(f"{private} cannot be written: {error}; name another folder with --private") from error


SCHEDULERS: Final[Mapping[str, Scheduler]] = {
    "slurm": Scheduler(_slurm, ("run_dir",)),
    "k8s": Scheduler(_kubernetes, ("name", "private")),
}
