"""`cluster.py render SCHEDULER`: prints the file with which a scheduler starts a run on several hosts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from engines.registry import AUTO
from launch.config.command_line import CommandLine, Words, resolve_config, split_words
from launch.config.files import write_config
from launch.config.run import RunConfig
from launch.errors import ConfigError, LaunchError, refuse
from launch.render.hosts import HostGroup, host_groups
from launch.render.kubernetes import KubernetesRun, manifests, secrets
from launch.render.skypilot import SkyTask, sky_task
from launch.render.slurm import SlurmJob, sbatch_script
from protocol.atomic_file import write_atomic
from protocol.keys import KEYS, make_keys

HOME: Final = Path(__file__).resolve().parents[2]
STORAGE_GIB: Final = 200
USAGE: Final = f"""\
usage: cluster.py render slurm --run-dir DIR [--sbatch=OPTIONS] [--config FILE] [--KEY VALUE ...] > job.sbatch
       cluster.py render k8s --name NAME --image IMAGE --private DIR [--storage GIB] [--config FILE] ... > run.yaml
       cluster.py render skypilot --name NAME --volume VOLUME [--accelerator GPU] [--config FILE] ... > task.yaml

Prints the file with which Slurm, Kubernetes or SkyPilot starts a run on several hosts, and continues it from its newest
checkpoint when it starts it again. The section `cluster` says how many workers share a host, and what each host
has; all other keys are those of a run. docs/cluster.md has an example of each.

  --run-dir DIR      Slurm: folder of the run; all hosts must see it under this path, as they must see this clone
  --sbatch=OPTIONS   further options of sbatch, in one word: --sbatch="--partition=gpu --time=24:00:00"
  --name NAME        name of the run, and of what belongs to it: lower-case letters, digits and dashes
  --image IMAGE      Kubernetes: container image in which `stillhouse` can be called
  --private DIR      Kubernetes: folder for the keys of the run and their Secrets, secrets.yaml. It is made if it is not
                     there; keys that it has are kept. Only you can read it
  --storage GIB      Kubernetes: size of the volume for the run's folder [{STORAGE_GIB}]
  --volume VOLUME    SkyPilot: its name of the volume for the run's folder, to which all nodes must be able to write
  --accelerator GPU  SkyPilot: its name of the GPUs, e.g. H100
  --config FILE      configuration of the run
  --KEY VALUE        any key of a run; cluster.py --help explains all keys, --help cluster those of hosts
"""


class Asked(NamedTuple):
    """The parsed command line."""

    words: Words
    file: Path | None
    config: RunConfig
    groups: tuple[HostGroup, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the run that were given, as words of a command line."""
        return tuple(word for key, text in self.words.overrides for word in (f"--{key.name}", text))

    def flag(self, name: str, expected: str) -> str:
        """Value of a flag of this scheduler. Raises ConfigError without it."""
        if not self.words.own.get(name):
            raise ConfigError(f"--{name.replace('_', '-')}: got none, expected {expected}")
        return self.words.own[name]


class Scheduler(NamedTuple):
    render: Callable[[Asked], str]
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
        text = SCHEDULERS[name].render(Asked(words, file, config, host_groups(config)))
    except LaunchError as error:
        return refuse(error)
    print(text, end="")
    return 0


def _slurm(asked: Asked) -> str:
    run_dir = Path(asked.flag("run_dir", "the folder of the run, which all hosts see")).expanduser().absolute()
    if not re.fullmatch(r"[A-Za-z0-9._-]+", run_dir.name):
        raise ConfigError(f"--run-dir: got the name {run_dir.name!r}, expected letters, digits, dots, dashes and _")
    described = ("--config", str(asked.file)) if asked.file is not None else ()
    job = SlurmJob(
        name=run_dir.name,
        run_dir=run_dir,
        home=HOME,
        arguments=(*described, *asked.keys),
        groups=asked.groups,
        port=asked.config.cluster.port,
        options=tuple(shlex.split(asked.words.own.get("sbatch", ""))),
    )
    return sbatch_script(job)


def _kubernetes(asked: Asked) -> str:
    name, private = _name(asked), _private(asked)
    storage = asked.words.own.get("storage", str(STORAGE_GIB))
    if not (storage.isdecimal() and int(storage)):
        raise ConfigError(f"--storage: got {storage!r}, expected a number of GiB")
    image = asked.flag("image", "a container image in which `stillhouse` can be called")
    _refuse_undecided(asked)
    _write_private(asked.config, private)
    run = KubernetesRun(
        name=name,
        image=image,
        config=(private / "config.yaml").read_text(),
        groups=asked.groups,
        port=asked.config.cluster.port,
        storage_gib=int(storage),
    )
    _write(private / "secrets.yaml", secrets(run, private / KEYS))
    return manifests(run)


def _skypilot(asked: Asked) -> str:
    name = _name(asked)
    volume = asked.flag("volume", "SkyPilot's name of a volume to which all nodes can write")
    gpus = any(group.host.gpus for group in asked.groups)
    accelerator = asked.flag("accelerator", "SkyPilot's name of the GPUs, such as H100") if gpus else ""
    return sky_task(
        SkyTask(
            name=name,
            config=str(asked.file or ""),
            arguments=asked.keys,
            volume=volume,
            accelerator=accelerator,
            groups=asked.groups,
            port=asked.config.cluster.port,
        )
    )


SCHEDULERS: Final[Mapping[str, Scheduler]] = {
    "slurm": Scheduler(_slurm, ("run_dir", "sbatch")),
    "k8s": Scheduler(_kubernetes, ("name", "image", "private", "storage")),
    "skypilot": Scheduler(_skypilot, ("name", "volume", "accelerator")),
}


def _name(asked: Asked) -> str:
    name = asked.flag("name", "a name for the run")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigError(f"--name: got {name!r}, expected up to 40 lower-case letters, digits and dashes")
    return name


def _private(asked: Asked) -> Path:
    return Path(asked.flag("private", "a folder for the keys of the run")).expanduser().absolute()


def _refuse_undecided(asked: Asked) -> None:
    """Raise ConfigError where hosts would choose engines by themselves, each what it finds."""
    engines = {"actors": ("actor.engine", asked.config.actor.engine)}
    engines["teachers"] = ("teacher.engine", asked.config.teacher.engine)
    joining = [group.name for group in asked.groups]
    undecided = [key for name, (key, engine) in engines.items() if name in joining and engine == AUTO]
    if undecided:
        raise ConfigError(*(f"{key}: got {AUTO}, expected torch or sglang, the same on all hosts" for key in undecided))


def _write_private(config: RunConfig, private: Path) -> None:
    """Keys, where there are none yet, and the resolved configuration."""
    try:
        private.mkdir(parents=True, mode=0o700, exist_ok=True)
        make_keys(private / KEYS)
        write_config(config, private / "config.yaml")
    except OSError as error:
        raise LaunchError(f"{private} cannot be written: {error}; name another folder with --private") from error


def _write(file: Path, text: str) -> None:
    try:
        file.touch(mode=0o600)
        write_atomic(file, text.encode())
        file.chmod(0o600)
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error}") from error
